"""The training command that fits a prepared dataset, for a first run on it."""

import re
import shlex
from pathlib import PurePosixPath
from typing import NamedTuple

from MaxText.input_pipeline.token_store.manifest import Manifest

# Repeating text up to four times is almost as good as new text (Muennighoff et al. 2023).
_MAX_EPOCHS = 4
_MIN_STEPS = 100  # of a corpus that is too small for any model; it is repeated as often as needed
_NUM_EVALUATIONS = 10  # per run
_MAX_EVAL_STEPS = 50  # batches of an evaluation, if the validation split has more


class _Preset(NamedTuple):
    """A model and its batch for datasets of at least `min_tokens`, on one device."""

    min_tokens: float
    model: str  # a configuration file, or model_name=
    sequences: int  # per step
    length: int
    max_steps: int
    keys: tuple[str, ...]  # learning rate for the size of the model, batch, checkpoints


# Largest first. Learning rates are those of GPT-3 (Brown et al. 2020) for 125M, of Pythia (Biderman
# et al. 2023) for 70M, and of configs/quickstart.yml.
_PRESETS = (
    _Preset(
        1e9,
        "model_name=gpt2-124m",
        96,
        1024,
        50_000,
        (
            "per_device_batch_size=12",
            "gradient_accumulation_steps=8",
            "learning_rate=6e-4",
            "warmup_steps_fraction=0.02",
            "checkpoint_period=1000",
            "max_to_keep=3",
            "step_log_period=10",
        ),
    ),
    _Preset(
        5e7,
        "model_name=pythia-70m",
        64,
        1024,
        20_000,
        (
            "max_target_length=1024",
            "per_device_batch_size=16",
            "gradient_accumulation_steps=4",
            "learning_rate=1e-3",
            "warmup_steps_fraction=0.02",
            "checkpoint_period=500",
            "max_to_keep=3",
            "step_log_period=10",
        ),
    ),
    # Its text is that of the dataset, not the Python standard library's.
    _Preset(
        0.0,
        "quickstart.yml",
        16,
        128,
        2_000,
        ("learning_rate=6e-3", "prepare_source=", "prompt=The"),
    ),
)


def train_arguments(manifest: Manifest, dataset_path: str) -> list[str]:
    """Returns the arguments of train.py for a first run on a dataset, quoted for a shell.

    The model and its learning rate follow the size of the dataset, and the steps its tokens: at
    most four epochs on one device. With a validation split there are evaluations. The run has a
    name, so that the same command resumes it. Empty if there is no text to train on.
    """
    train = manifest.splits.get("train")
    if train is None or train.num_tokens < 2:  # no token has a target
        return []
    preset = next(preset for preset in _PRESETS if train.num_tokens >= preset.min_tokens)
    # A window needs one token more than its inputs; a text may be shorter than that of the preset.
    length = min(preset.length, 2 ** ((train.num_tokens - 1).bit_length() - 1))
    tokens_per_step = preset.sequences * length
    steps = _MAX_EPOCHS * train.num_tokens // tokens_per_step
    steps = min(max(steps, _MIN_STEPS), preset.max_steps)
    arguments = [
        preset.model,
        f"run_name={_run_name(dataset_path)}",
        f"dataset_path={dataset_path}",
        f"vocab_size={manifest.tokenizer.vocab_size}",
        f"steps={steps}",
        *preset.keys,
    ]
    if length < preset.length:
        arguments.append(f"max_target_length={length}")
    validation = manifest.splits.get("validation")
    if validation is None or validation.num_tokens < 2:  # no token has a target
        arguments.append("eval_interval=-1")
    else:
        num_batches = validation.num_tokens // tokens_per_step
        eval_steps = _MAX_EVAL_STEPS if num_batches > _MAX_EVAL_STEPS else -1
        arguments += [f"eval_interval={steps // _NUM_EVALUATIONS}", f"eval_steps={eval_steps}"]
    return [shlex.quote(argument) for argument in arguments]


def _run_name(dataset_path: str) -> str:
    """Returns the name of a dataset's folder, with letters that every file system allows."""
    name = PurePosixPath(dataset_path.rstrip("/")).name
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "first"
