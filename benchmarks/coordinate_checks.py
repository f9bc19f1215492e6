"""Do activations keep their size over widths and depths, for a preset of every family?

    python benchmarks/coordinate_checks.py FOLDER                    all: two hours on 2 cores
    python benchmarks/coordinate_checks.py FOLDER --presets gpt2-124m qwen3-0.6b
    python benchmarks/coordinate_checks.py FOLDER --report           of the checks so far

Each preset is checked as by MaxText/coord_check.py (docs/how-to/transfer_hyperparameters.md),
with as few layers as its pattern of layers allows, and at most eight experts:

- `mup` over widths 64, 256, 1024: slopes of all activations and of their changes have to be 0. With
  a slope whose interval is wider than the tolerance, it is repeated with 15 seeds;
- `standard` over widths 64, 256: some change has to grow, or the check could not fail;
- `completep` over depths 2, 8, 32, of presets with one kind of layers.

Initial weights have a standard deviation of 1 / sqrt(fan-in), and tied heads divide their logits by
sqrt(emb_dim): with logits as large as that, the softmax of narrow models is saturated, and their
first updates are others.

FOLDER gets checks.json and checks.md. The same command again checks only what is missing.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import MaxText as mt  # noqa: E402
from MaxText.config.problems import ConfigurationError  # noqa: E402
from MaxText.config.schema import Config  # noqa: E402
from MaxText.experiments.coordinate_check import (  # noqa: E402
    CheckPlan,
    Quantity,
    Size,
    Slope,
    check_size,
)
from MaxText.storage.atomic import atomic_write_text  # noqa: E402

# One of each family, the smallest. Gemma 4 is missing: `layer_kinds` sets sizes of its heads, which
# coord_check.py does not scale.
PRESETS = (
    "gpt2-124m",
    "gpt-neo-125m",
    "gpt3-52k",
    "pythia-160m",
    "tokenformer-150m",
    "muddformer-405m",
    "muddpythia-1.4b",
    "fattorib-base",
    "bert-base-like",
    "llama3.2-1b",
    "mistral-7b",
    "mixtral-8x7b",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "qwen3-30b-a3b",
    "qwen3-next-180m",
    "qwen3.5-9b",
    "gemma-2b",
    "gemma2-2b",
    "gemma3-1b",
    "olmo2-1b",
    "olmo3-7b",
    "deepseek2-16b",
    "deepseek3-240m",
    "gpt-oss-20b",
    "glm-4.5-air",
    "granite3.3-2b",
    "granite4.0-h-tiny",
    "kimi-linear-240m",
    "mamba2-130m",
    "nemotron-h-170m",
    "phi-4",
    "smollm3-3b",
    "falcon-h1-0.5b",
)
# Of layers that are alike and in a row, which completep's multiplier of branches is for.
PRESETS_OVER_DEPTHS = (
    "gpt2-124m",
    "llama3.2-1b",
    "mistral-7b",
    "olmo2-1b",
    "pythia-160m",
    "qwen3-0.6b",
    "tokenformer-150m",
)
_TOLERANCE = 0.1
_SEEDS, _MORE_SEEDS = 5, 15
_STEPS = 3
_MAX_EXPERTS, _MAX_EXPERTS_PER_TOKEN = 8, 2
_MAX_LAYERS = 16
# A learning rate above the tuned ones.
_KEYS = {"dataset_type": "synthetic", "steps": _STEPS, "learning_rate": 0.01}


class Check(NamedTuple):
    """One parametrization of a preset."""

    preset: str
    parametrization: str
    size: Size
    sizes: tuple[int, ...]


class Outcome(NamedTuple):
    """What a check found."""

    num_layers: int  # of the models of different widths, or of the shallowest
    num_quantities: int
    num_seeds: int
    largest: str  # the quantity with the largest slope; the smallest if that may not shrink
    slope: Slope  # of `largest`
    failed: list[str]
    uncertain: list[str]


def checks_of(preset: str) -> list[Check]:
    """Returns the checks of a preset."""
    checks = [
        Check(preset, "mup", "width", (64, 256, 1024)),
        Check(preset, "standard", "width", (64, 256)),
    ]
    if preset in PRESETS_OVER_DEPTHS:
        checks.append(Check(preset, "completep", "depth", (2, 8, 32)))
    return checks


def configure(check: Check) -> Config:
    """Returns a preset with the fewest layers that its pattern of layers allows, two or more."""
    keys: dict[str, Any] = {"model_name": check.preset, **_KEYS}
    keys |= {"weight_init": "fan_in", "parametrization": check.parametrization}
    preset = mt.load_config(model_name=check.preset, **_KEYS)
    if preset.model.head.logits_via_embedding:
        keys["normalize_embedding_logits"] = True
    if preset.model.mixture_of_experts.num_experts > _MAX_EXPERTS:
        keys |= {"num_experts": _MAX_EXPERTS, "num_experts_per_tok": _MAX_EXPERTS_PER_TOKEN}
    for num_layers in range(2, _MAX_LAYERS):
        with contextlib.suppress(ConfigurationError):
            return mt.load_config(**keys, base_num_decoder_layers=num_layers)
    return mt.load_config(**keys, base_num_decoder_layers=_MAX_LAYERS)


def run(check: Check) -> Outcome:
    """Trains the models of a check; repeats it with more seeds if it is uncertain."""
    config = configure(check)
    outcome = _run_with(_SEEDS, check, config)
    if check.parametrization != "standard" and outcome.uncertain and not outcome.failed:
        outcome = _run_with(_MORE_SEEDS, check, config)
    return outcome


def _run_with(num_seeds: int, check: Check, config: Config) -> Outcome:
    is_width = check.size == "width"
    plan = CheckPlan(
        widths=check.sizes if is_width else (64,),
        depths=() if is_width else check.sizes,
        seeds=range(num_seeds),
        num_steps=_STEPS,
        tolerance=_TOLERANCE,
    )
    quantities = check_size(config, plan, check.size, lambda line: None)
    largest = max(quantities, key=_distance_from_zero)
    uncertain = [q.label for q in quantities if q.is_uncertain(_TOLERANCE)]
    failed = [q.label for q in quantities if not q.passes(_TOLERANCE)]
    return Outcome(
        num_layers=config.model.shape.dimensions.num_layers if is_width else check.sizes[0],
        num_quantities=len(quantities),
        num_seeds=num_seeds,
        largest=largest.label,
        slope=largest.slope(),
        failed=[label for label in failed if label not in uncertain],
        uncertain=uncertain,
    )


def _distance_from_zero(quantity: Quantity) -> float:
    """Returns the end of the interval that is farthest from 0 on a side that counts."""
    slope = quantity.slope()
    return slope.high if quantity.may_shrink else max(slope.high, -slope.low)


def report_lines(outcomes: dict[Check, Outcome]) -> list[str]:
    """Returns a table in Markdown, one row per check."""
    header = ["preset", "layers", "parametrization", "sizes", "of", "seeds"]
    header += ["farthest slope", "interval", "activations", ""]
    rows = []
    for check, outcome in outcomes.items():
        slope, low, high = outcome.slope
        rows.append(
            [
                check.preset,
                str(outcome.num_layers),
                check.parametrization,
                f"{check.size} {', '.join(map(str, check.sizes))}",
                str(outcome.num_quantities),
                str(outcome.num_seeds),
                f"{slope:+.3f}",
                f"{low:+.3f} to {high:+.3f}",
                outcome.largest,
                _verdict(outcome),
            ]
        )
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _verdict(outcome: Outcome) -> str:
    if outcome.failed:
        return f"{len(outcome.failed)} change"
    return f"{len(outcome.uncertain)} uncertain" if outcome.uncertain else "flat"


def read(path: Path) -> dict[Check, Outcome]:
    """Returns the outcomes of a file; empty without one."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {
        Check(**check | {"sizes": tuple(check["sizes"])}): Outcome(
            **outcome | {"slope": Slope(*outcome["slope"])}
        )
        for check, outcome in rows
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--report", action="store_true", help="train nothing")
    return parser.parse_args()


def main() -> None:
    """Checks what is missing, and writes the table."""
    arguments = _arguments()
    path = arguments.folder / "checks.json"
    outcomes = read(path)
    checks: Sequence[Check] = [c for preset in arguments.presets for c in checks_of(preset)]
    for check in () if arguments.report else checks:
        if check in outcomes:
            continue
        outcomes[check] = run(check)
        print(*check, _verdict(outcomes[check]), flush=True)
        jax.clear_caches()
        rows = [(c._asdict(), outcome._asdict()) for c, outcome in outcomes.items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(rows, indent=1) + "\n")
    lines = report_lines(outcomes)
    print(*lines, sep="\n")
    atomic_write_text(arguments.folder / "checks.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
