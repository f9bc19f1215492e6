"""Speed of text generation against transformers on the CPU.

    pip install '.[torch]'
    python benchmarks/decode.py                     GPT-2 of 124M parameters, batch sizes 1 and 8
    python benchmarks/decode.py --rounds 9 --batches 1 --new-tokens 128

Both sides run the same random weights in float32 and take the argmax 64 times after a
prompt of 32. transformers has a process of its own, so that neither side's threads or allocator
setting disturb the other. Times are those of whole calls, prompt included, after one call to warm
up; the ratio is the median over rounds. A step reads every weight once, so for one text the
memory's bandwidth bounds the speed: the share of it that we reach is taken from our steps and
from sums over as many bytes, in turn in the same run.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from MaxText.runtime import process_start, start_up  # noqa: E402

PROMPT_LENGTH = 32


def serve_theirs(folder: str) -> None:
    """Writes random weights to `folder`, then answers JSON lines."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    # Its defaults are GPT-2 small; larger weights than a fresh model's make texts less uniform.
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(initializer_range=0.08)).eval()
    model.save_pretrained(folder)
    about = (
        f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {model.num_parameters():,} parameters"
    )
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        prompts, num_tokens = json.loads(line)
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
            )
        texts = found[:, ids.shape[1] :].tolist()
        print(json.dumps([texts, time.perf_counter() - began]), flush=True)


class TransformersBaseline:
    """(prompts, new tokens) -> texts and seconds, by transformers."""

    def __init__(self, folder: str):
        """Starts it; the weights are in `folder` afterwards."""
        command = [sys.executable, __file__, "--serve", folder]
        # Without our allocator setting, which is not made for torch.
        environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        print(self._answer())

    def _answer(self):
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("transformers' process has ended")
        return json.loads(line)

    def __call__(self, prompts, num_tokens: int):
        """One call of generate."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, num_tokens]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def maxtext_engine(folder: str):
    """The same by our engine; the engine, and its weight bytes per step."""
    import jax

    from MaxText.inference.checkpoint_config import load
    from MaxText.inference.engine import Engine
    from MaxText.inference.generate import StoppingCriteria, generate
    from MaxText.inference.sampling import SamplingParams
    from MaxText.inference.trained_model import load_model

    config = load([f"load_parameters_path=hf:{folder}", "dtype=float32", "hardware=cpu"]).config
    trained = load_model(config)
    params = trained.model.unstack_params(trained.params)
    engine = Engine(trained.model, params, trained.sharding, SamplingParams(temperature=0))
    # Of the position table a step reads one row per text.
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    num_bytes -= params["position_embedder"]["embedding"].nbytes

    def texts(prompts, num_tokens: int):
        began = time.perf_counter()
        found = dict(
            generate(engine, prompts, StoppingCriteria(num_tokens), batch_size=len(prompts))
        )
        seconds = time.perf_counter() - began
        return [found[number].tokens for number in range(len(prompts))], seconds

    return texts, engine, num_bytes


def compare(sides, batch: int, num_tokens: int, rounds: int) -> None:
    """Prints the ratio of the two sides for one number of texts."""
    import numpy as np

    generator = np.random.default_rng(batch)
    prompts = generator.integers(0, 50257, (batch, PROMPT_LENGTH)).tolist()
    first = {name: side(prompts, num_tokens)[0] for name, side in sides.items()}
    same = np.mean(np.array(first["ours"]) == np.array(first["transformers"]))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(side(prompts, num_tokens)[1])
    print(f"{batch} texts of {PROMPT_LENGTH} + {num_tokens} tokens; {same:.1%} of tokens alike")
    for name, taken in seconds.items():
        median = np.median(taken)
        print(
            f"  {name:12} {median:.3f} s (least {min(taken):.3f}), "
            f"{batch * num_tokens / median:,.1f} tokens/s"
        )
    ratios = np.array(seconds["transformers"]) / np.array(seconds["ours"])
    low, high = np.quantile(ratios, [0.25, 0.75])
    print(
        f"  transformers' time / ours: median {np.median(ratios):.2f}, quartiles {low:.2f} to "
        f"{high:.2f} ({rounds} rounds)"
    )


def bandwidth(engine, num_bytes: int, rounds: int) -> None:
    """Prints the share of memory bandwidth at batch size 1."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    weights = jnp.ones(num_bytes // 4, jnp.float32)
    read = jax.jit(jnp.sum)
    read(weights).block_until_ready()
    sequences, _ = engine.prefill([[1] * PROMPT_LENGTH], [(0, 0)], [0], seed=0, room=256)
    sequences, drawn = engine.step(sequences)
    drawn.on_host()
    seconds: dict[str, list[float]] = {"step": [], "sum": []}
    for _ in range(10 * rounds):
        began = time.perf_counter()
        sequences, drawn = engine.step(sequences)
        drawn.on_host()
        seconds["step"].append(time.perf_counter() - began)
        began = time.perf_counter()
        read(weights).block_until_ready()
        seconds["sum"].append(time.perf_counter() - began)
    ratio = np.median(np.array(seconds["sum"]) / np.array(seconds["step"]))
    step, total = np.median(seconds["step"]), np.median(seconds["sum"])
    print(
        f"a step for one text: {step * 1e3:.1f} ms for {num_bytes / 1e6:.0f} MB of weights, "
        f"{num_bytes / step / 1e9:.1f} GB/s; a sum over as many bytes {total * 1e3:.1f} ms, "
        f"{num_bytes / total / 1e9:.1f} GB/s\n"
        f"  share of the bandwidth: median {ratio:.2f}, of the least "
        f"{min(seconds['sum']) / min(seconds['step']):.2f}"
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Our text generation against transformers'.")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_theirs(options.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        their_texts = TransformersBaseline(folder)
        our_texts, engine, num_bytes = maxtext_engine(folder)
    bandwidth(engine, num_bytes, options.rounds)
    sides = {"ours": our_texts, "transformers": their_texts}
    for batch in options.batches:
        compare(sides, batch, options.new_tokens, options.rounds)
    their_texts.close()


if __name__ == "__main__":
    if "--serve" not in sys.argv:
        process_start.reexec_with_malloc_tuning()
        start_up.choose_platform("cpu")
    main()
