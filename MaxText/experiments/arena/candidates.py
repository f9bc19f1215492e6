"""Candidates of an arena session: what they change, and what they may not.

A candidate is a configuration file, or a module with a part of the user's:

    new_block.yml [key=value ...]
    my_mixer.py[:Class] [key=value ...]

A file is loaded as train.py would. A part is put into the baseline by the key of its kind, such as
mixer=my_mixer. Either way, a candidate may differ from the baseline only in keys of the model, the
objective and the optimizer (`is_open`). Everything else belongs to the session.
"""

import dataclasses
import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from MaxText.config import registry
from MaxText.config.loading import load
from MaxText.config.problems import ConfigurationError
from MaxText.config.registry import Registration
from MaxText.config.schema import Config, Key, all_keys, flatten
from MaxText.config.serialization import diff_configs
from MaxText.config.sources import CheckpointConfig
from MaxText.config.values import to_yaml
from MaxText.errors import UserError, first_line
from MaxText.experiments.arena.isolation import Guard, source_files

_PROGRAM = "train.py"
_MODULES = "import_modules"
_CONFIG_FILES = (".yml", ".yaml", ".json")
# Sections that describe the model, its objective and its optimizer. A key that is added to another
# section belongs to the session.
_OPEN_SECTIONS = (
    ("model", "embedding"),
    ("model", "block"),
    ("model", "position"),
    ("model", "attention"),
    ("model", "recurrent"),
    ("model", "feed_forward"),
    ("model", "mixture_of_experts"),
    ("model", "pattention"),
    ("model", "dense_connections"),
    ("model", "head"),
    ("model", "objective"),
    ("model", "dropout"),
    ("model", "memory"),
    ("model", "parts"),
    ("optimizer",),
)
# Keys of sections whose other keys belong to the session.
_OPEN_KEYS = frozenset(
    {
        "decoder_block",
        "global_parameter_scale",
        "base_emb_dim",
        "base_num_query_heads",
        "base_num_kv_heads",
        "base_mlp_dim",
        "base_num_decoder_layers",
        "head_dim",
        "weight_init",
        "init_std",
        "embedding_init_std",
        "init_scale_by.depth",
        "init_scale_by.fan_in",
        "dtype",
        "weight_dtype",
        "matmul_precision",
        "quantization",
        "quantization_rules",
        "learning_rate",
        "lr_schedule_type",
        "warmup_steps_fraction",
        "warmup_steps",
        "learning_rate_final_fraction",
        "wsd_decay_steps_fraction",
        "learning_rate_decay.power",
        "learning_rate_decay.multiplies_warmup",
        "learning_rate_decay.after",
    }
)
# Keys of open sections that decide what is predicted from what.
_CLOSED_KEYS = frozenset({"causal"})
# Names of a run and of its preset: the session sets the first two, the third is resolved.
_NAMES = frozenset({"run_name", "base_output_directory", "model_name", "metrics_file", _MODULES})
# What closed keys decide, for reasons; the first prefix of a key's section or name that fits.
_OWNED = (
    (("data_shuffle_seed", "init_weights_seed"), "the seeds"),
    (("tokenizer_", "vocab_size", "preparation"), "the tokenizer"),
    (("eval_", "evaluation", "grain_eval_files"), "the validation text and its length"),
    (("masking", "zero_loss", "causal"), "which tokens count in the loss"),
    (("steps", "schedule", "learning_rate_schedule_steps"), "the length of the run"),
    (("batch", "max_target_length"), "the batch"),
    (("data",), "the data"),
    (("load_parameters_path", "load_full_state_path", "checkpoint"), "the initial weights"),
)


class CandidateRefusedError(UserError):
    """A candidate that may not run.

    Attributes:
      reasons: Sentences for the user.
    """

    def __init__(self, reasons: Sequence[str]):
        self.reasons = list(reasons)
        super().__init__("\n".join(self.reasons))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A candidate that changes only what it may.

    Attributes:
      label: Short name of its file or part.
      spec: As the user wrote it.
      config: Resolved.
      changes: Key -> value of the baseline and of the candidate, as YAML.
      files: Source file of the user's code -> SHA-256.
      source_hash: Of the resolved keys and the contents of the files.
      guard: Over its code in this process.
    """

    label: str
    spec: str
    config: Config
    changes: Mapping[str, tuple[str, str]]
    files: Mapping[str, str]
    source_hash: str
    guard: Guard

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that it imports, as `import_modules` names them."""
        return self.config.run.import_modules

    @property
    def parts(self) -> list[Registration]:
        """The parts of the user's own that the configuration uses."""
        chosen = flatten(self.config)
        used = set()
        for letter_keys in ({}, *(chosen["layer_kinds"] or {}).values()):
            keys = chosen | letter_keys
            used |= {(kind, keys[key]) for kind, key in registry.KINDS.items()}
        return [
            part
            for part in registry.registrations()
            if not part.is_built_in and (part.kind, part.name) in used
        ]


def is_open(key: Key) -> bool:
    """Returns whether a candidate may change a key.

    A key is closed unless it is listed: one that is new in a section of the session, or in a
    section that is new, belongs to the session.
    """
    if key.name in _CLOSED_KEYS:
        return False
    return key.name in _OPEN_KEYS or any(
        key.section[: len(section)] == section for section in _OPEN_SECTIONS
    )


def read_candidate(spec: str, baseline: Config, keys: Sequence[str] = ()) -> Candidate:
    """Returns a candidate; imports its code, so call it in a process of the candidate's own.

    Args:
      spec: A configuration file or a module, then key=value, as on a command line.
      baseline: Of the session.
      keys: key=value that the session applies to every configuration.

    Raises:
      CandidateRefusedError: The candidate cannot be loaded, or changes what belongs to the session.
    """
    guard = Guard(trusted=baseline.run.import_modules)
    try:
        return _read(spec, baseline, keys, guard)
    except CandidateRefusedError:
        guard.watch.stop()
        raise


def _read(spec: str, baseline: Config, keys: Sequence[str], guard: Guard) -> Candidate:
    """Returns a candidate, with a guard from before it is imported; see `read_candidate`."""
    before = set(source_files())
    label, config = _load(spec, baseline, keys)
    imported = [path for path in source_files() if path not in before]
    changes = diff_configs(flatten(baseline), flatten(config))
    reasons = closed_changes(changes) + _undeclared_files(imported, config.run.import_modules)
    reasons += _registered_data(config)
    if reasons:
        raise CandidateRefusedError([*guard.problems(), *reasons])
    files = hash_files(imported)
    return Candidate(
        label=label,
        spec=spec,
        config=config,
        changes=changes,
        files=files,
        source_hash=configuration_hash(config, files),
        guard=guard,
    )


def _load(spec: str, baseline: Config, keys: Sequence[str]) -> tuple[str, Config]:
    """Returns the label and the configuration of a candidate; see `read_candidate`."""
    try:
        file, *own_keys = shlex.split(spec)
    except ValueError as error:
        raise CandidateRefusedError([f"{spec!r} is not a candidate: {error}"]) from error
    try:
        if file.endswith(_CONFIG_FILES):
            return Path(file).stem, load([file, *keys, *own_keys], _PROGRAM).config
        return _with_part(file, own_keys, baseline)
    except ConfigurationError as error:
        raise CandidateRefusedError([issue.text for issue in error.problems]) from error
    except UserError as error:
        raise CandidateRefusedError([str(error)]) from error
    except Exception as error:  # the code of a candidate can raise anything
        raise CandidateRefusedError(
            [f"{file} cannot be loaded: {type(error).__name__}: {first_line(error)}"]
        ) from error


def _with_part(spec: str, own_keys: Sequence[str], baseline: Config) -> tuple[str, Config]:
    """Returns the name of a part, and the baseline with it.

    Args:
      spec: MODULE[:CLASS].
      own_keys: key=value of the candidate.
      baseline: Of the session.
    """
    module, name = registry.split_part_spec(spec)
    recorded = CheckpointConfig(flatten(baseline), "the baseline")
    modules = to_yaml([*baseline.run.import_modules, module])
    earlier_parts = registry.registrations()
    load([f"{_MODULES}={modules}"], recorded=recorded)
    parts = [part for part in registry.registrations() if part not in earlier_parts]
    if name:
        parts = registry.parts_named(parts, name)
    kinds = [part.kind for part in parts]
    if not parts:
        raise UserError(f"{spec} registers no part (MaxText.layers.part.register)")
    if len(set(kinds)) < len(kinds):
        named = ", ".join(part.name for part in parts)
        raise UserError(f"{spec} registers several parts of a kind ({named}): write {module}:CLASS")
    choices = [f"{registry.KINDS[part.kind]}={part.name}" for part in parts]
    arguments = [f"{_MODULES}={modules}", *choices, *own_keys]
    return "+".join(part.name for part in parts), load(
        arguments, _PROGRAM, recorded=recorded
    ).config


def closed_changes(changes: Mapping[str, tuple[str, str]]) -> list[str]:
    """Returns a reason for each changed key that belongs to the session.

    Args:
      changes: Key -> value of the baseline and of the candidate, as YAML.
    """
    reasons = []
    known_keys = all_keys()
    for name, (baseline_value, value) in changes.items():
        key = known_keys.get(name)
        if name in _NAMES or (key is not None and is_open(key)):
            continue
        reasons.append(
            f"{name}={value}: {_owner(name)} to the session, where it is {baseline_value}; remove "
            "the key, or inherit the baseline by base_config"
        )
    return reasons


def _owner(name: str) -> str:
    """Returns what a closed key decides, with its verb: "the data belong"."""
    section = ".".join(all_keys()[name].section) if name in all_keys() else ""
    for prefixes, owned in _OWNED:
        if name.startswith(prefixes) or section.startswith(prefixes):
            verb = (
                "belong" if owned in ("the data", "the seeds", "the initial weights") else "belongs"
            )
            return f"{owned} {verb}"
    return "this key belongs"


def _undeclared_files(files: Sequence[str], modules: Sequence[str]) -> list[str]:
    """Returns a reason for each imported file outside of the folders of the named modules."""
    folders = {
        os.path.dirname(os.path.realpath(name))
        if name.endswith(".py")
        else os.path.realpath(name.partition(".")[0])
        for name in modules
    }
    roots = tuple(os.path.join(folder, "") for folder in folders)
    return [
        f"it imports {path}, which is not in the folder of a module that it names"
        for path in files
        if not path.startswith(roots) and os.path.splitext(path)[0] not in folders
    ]


def _registered_data(config: Config) -> list[str]:
    """Returns a reason if the session's data come from a source of the candidate's own code."""
    name = config.data.dataset_type
    parts = [
        part
        for part in registry.registrations()
        if part.kind == "data_source" and part.name == name and not part.is_built_in
    ]
    return [f"dataset_type={name}: the data belong to the session" for _ in parts]


def configuration_hash(config: Config, files: Mapping[str, str]) -> str:
    """Returns the SHA-256 of what a run computes: resolved keys and contents of source files.

    Neither the names of files and runs nor the seeds count.

    Args:
      config: Resolved.
      files: Source file -> SHA-256.
    """
    not_counted = _NAMES | {"data_shuffle_seed", "init_weights_seed"}
    keys = {
        name: to_yaml(value) for name, value in flatten(config).items() if name not in not_counted
    }
    content = json.dumps([sorted(keys.items()), sorted(files.values())])
    return hashlib.sha256(content.encode()).hexdigest()


def hash_files(paths: Sequence[str]) -> dict[str, str]:
    """Returns source files with their SHA-256."""
    return {path: _sha256(path) for path in paths}


def changed_files(files: Mapping[str, str]) -> list[str]:
    """Returns the source files that have other contents now, or are gone.

    Args:
      files: Source file -> SHA-256, as `hash_files` returns.
    """
    return [
        path
        for path, digest in files.items()
        if not Path(path).is_file() or _sha256(path) != digest
    ]


def _sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
