"""Speed of text generation against transformers on the CPU.

    pip install '.[torch]'
    python benchmarks/decode.py                     GPT-2 of 124M parameters, batch sizes 1 and 8
    python benchmarks/decode.py --rounds 9 --batches 1 --new-tokens 128

Both sides run the same random weights in float32 and take the argmax 64 times after a
prompt of 32. transformers has a process of its own, so that neither side's threads or allocator
setting disturb the other. Times are those of whole calls, prompt included.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import pathlib
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from MaxText.runtime import process_start, start_up  # noqa: E402

PROMPT_LENGTH = 32

_theirs: Any = None  # in the process of transformers


def load_theirs(folder: str) -> str:
    """Writes random weights to `folder`; describes their side."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    global _theirs
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    # Its defaults are GPT-2 small; larger weights than a fresh model's make texts less uniform.
    _theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(initializer_range=0.08)).eval()
    _theirs.save_pretrained(folder)
    return (
        f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {_theirs.num_parameters():,} parameters"
    )


def their_texts(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    import torch  # pyright: ignore[reportMissingImports]

    ids = torch.tensor(prompts)
    with torch.inference_mode():
        found = _theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
        )
    return found[:, ids.shape[1] :].tolist()


def load_ours(folder: str):
    """Returns our engine."""
    from MaxText.inference.checkpoint_config import load
    from MaxText.inference.engine import Engine
    from MaxText.inference.sampling import SamplingParams
    from MaxText.inference.trained_model import load_model

    config = load([f"load_parameters_path=hf:{folder}", "dtype=float32", "hardware=cpu"]).config
    trained = load_model(config)
    params = trained.model.unstack_params(trained.params)
    return Engine(trained.model, params, trained.sharding, SamplingParams(temperature=0))


def our_texts(engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    from MaxText.inference.generate import StoppingCriteria, generate

    found = dict(generate(engine, prompts, StoppingCriteria(num_tokens), batch_size=len(prompts)))
    return [found[number].tokens for number in range(len(prompts))]


def compare(engine, theirs, batch: int, num_tokens: int, rounds: int) -> None:
    """Prints the ratio of the two sides for one number of texts."""
    import numpy as np
    import train_steps

    generator = np.random.default_rng(batch)
    prompts = generator.integers(0, 50257, (batch, PROMPT_LENGTH)).tolist()
    sides = {
        "ours": lambda: our_texts(engine, prompts, num_tokens),
        "transformers": lambda: theirs.submit(their_texts, prompts, num_tokens).result(),
    }
    same = np.mean(np.array(sides["ours"]()) == np.array(sides["transformers"]()))
    print(f"{batch} texts of {PROMPT_LENGTH} + {num_tokens} tokens; {same:.1%} of tokens alike")
    seconds = train_steps.seconds_in_turn(sides, rounds)
    for name, taken in seconds.items():
        median = np.median(taken)
        print(
            f"  {name:12} {median:.3f} s (least {min(taken):.3f}), "
            f"{batch * num_tokens / median:,.1f} tokens/s"
        )
    words = train_steps.ratio_words(seconds["transformers"] / seconds["ours"])
    print(f"  transformers' time / ours: {words}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Our text generation against transformers'.")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.pop("GLIBC_TUNABLES", None)  # our allocator setting is not made for torch
    spawning = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawning) as theirs:
        with tempfile.TemporaryDirectory() as folder:
            print(theirs.submit(load_theirs, folder).result())
            engine = load_ours(folder)
        for batch in options.batches:
            compare(engine, theirs, batch, options.new_tokens, options.rounds)


if __name__ == "__main__":
    process_start.reexec_with_malloc_tuning()
    start_up.choose_platform("cpu")
    main()
