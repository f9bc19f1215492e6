"""The best learning rate over widths, depths, and tokens, under several parametrizations.

    python benchmarks/transfer.py FOLDER                    everything: days on 2 cores
    python benchmarks/transfer.py FOLDER --axes width --widths 64 128 256 \
        --recipes standard/adamw completep/adamw hyperp/muonh
    python benchmarks/transfer.py FOLDER --report           of the runs so far

Small Llamas (configs/comparisons/tiny.yml) are trained from several seeds at learning rates a
factor of two apart. If the best of them is the smallest or the largest, more are added beyond it.
Every seed has its optimum, that of a parabola in the logarithm of the rate around its best run, and
a size has their mean with Student's 95 % interval. A rate transfers if the optima of all sizes are
within a factor of two.

Heads are untied, and all recipes start from weights of standard deviation 1 / sqrt(fan-in), as
`standard` is used in practice. At the smallest size all parametrizations are the same model.

FOLDER gets transfer.json with every run, transfer.md with the tables, and one chart for each recipe
and axis. The same command again trains only what is missing. Losses do not depend on other programs
of the machine.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import MaxText as mt  # noqa: E402
from MaxText.config.base_shape import BaseShape  # noqa: E402
from MaxText.config.schema import Config, flatten, unflatten  # noqa: E402
from MaxText.evaluation.validation import evaluate, make_eval_step  # noqa: E402
from MaxText.experiments.ladder.learning_rate_sweep import (  # noqa: E402
    FACTORS,
    factors_of_round,
    find_optimum,
)
from MaxText.experiments.seed_statistics import Estimate  # noqa: E402
from MaxText.layers.assembly.model import Model  # noqa: E402
from MaxText.layers.batch import Batch  # noqa: E402
from MaxText.reports.chart import Axis, Chart, Series, draw_chart  # noqa: E402
from MaxText.storage.atomic import atomic_write_bytes, atomic_write_text  # noqa: E402
from MaxText.training import backend_defaults  # noqa: E402
from MaxText.training.optimizer import make_optimizer  # noqa: E402
from MaxText.training.schedule import learning_rate_schedule  # noqa: E402
from MaxText.training.state import TrainState  # noqa: E402
from MaxText.training.step import make_initialize, make_train_step  # noqa: E402

CONFIGURATION = ROOT / "configs" / "comparisons" / "tiny.yml"
AxisOfSizes = Literal["width", "depth", "tokens"]
AXES: tuple[AxisOfSizes, ...] = ("width", "depth", "tokens")
OPTIMIZERS = ("adamw", "muon", "muonh")
# Of hyperp, only optimizers that keep norms.
RECIPES = (
    *(f"standard/{name}" for name in OPTIMIZERS),
    *(f"completep/{name}" for name in OPTIMIZERS),
    "hyperp/muonh",
)
# The middle of the first rates: the best of coarse sweeps at the smallest size.
RATES = {"adamw": 1.6e-2, "muon": 3.2e-2, "muonh": 6.4e-2}
_HEAD_DIM = 16
_MLP_RATIO = 2.75


@dataclasses.dataclass(frozen=True)
class SweepSettings:
    """What all runs of a folder share.

    Attributes:
      width: emb_dim of the models that differ in depth and tokens; the base of all.
      depth: Layers of the models that differ in width and tokens; the base of all.
      steps: Of the models that differ in width and depth; those that differ in tokens have a
        multiple.
      length: Tokens of a sequence.
      eval_steps: Batches of the validation loss.
    """

    width: int = 64
    depth: int = 2
    steps: int = 200
    length: int = 128
    eval_steps: int = 32

    def base_size(self, axis: AxisOfSizes) -> int:
        """Returns the size of the base model on an axis."""
        return {"width": self.width, "depth": self.depth, "tokens": 1}[axis]


class Cell(NamedTuple):
    """Models that differ in the learning rate and the seed."""

    recipe: str  # parametrization/optimizer
    axis: AxisOfSizes
    size: int  # on the axis: width, layers, or multiple of the tokens

    @property
    def optimizer(self) -> str:
        """Name of the optimizer."""
        return self.recipe.split("/")[1]


class Point(NamedTuple):
    """One run."""

    cell: Cell
    factor: float  # of the recipe's learning rate
    seed: int


Losses = dict[Point, float | None]  # None of a run that diverged


def cell_of(recipe: str, axis: AxisOfSizes, size: int, settings: SweepSettings) -> Cell:
    """Returns the models of a size; the smallest size is the same on all axes."""
    if size == settings.base_size(axis):
        return Cell(recipe, "width", settings.width)
    return Cell(recipe, axis, size)


def cells_of_axis(
    recipe: str, axis: AxisOfSizes, settings: SweepSettings, losses: Losses
) -> dict[int, Cell]:
    """Returns size -> models with runs, ascending, with those of the smallest size."""
    sizes = {cell.size for cell, *_ in losses if (cell.recipe, cell.axis) == (recipe, axis)}
    cells = {
        size: cell_of(recipe, axis, size, settings)
        for size in sorted(sizes | {settings.base_size(axis)})
    }
    has_runs = {cell for cell, *_ in losses}
    return {size: cell for size, cell in cells.items() if cell in has_runs} if sizes else {}


def configure(cell: Cell, settings: SweepSettings) -> Config:
    """Returns the configuration of a model, at the middle learning rate."""
    parametrization = cell.recipe.split("/")[0]
    width = cell.size if cell.axis == "width" else settings.width
    depth = cell.size if cell.axis == "depth" else settings.depth
    steps = settings.steps * (cell.size if cell.axis == "tokens" else 1)
    base_shape = {} if parametrization == "standard" else {"base_shape": _base_shape(settings)}
    return mt.load_config(
        CONFIGURATION,
        parametrization=parametrization,
        **base_shape,
        **_width_keys(width),
        base_num_decoder_layers=depth,
        max_target_length=settings.length,
        steps=steps,
        opt_type=cell.optimizer,
        learning_rate=RATES[cell.optimizer],
        weight_init="fan_in",
        logits_via_embedding=False,
        eval_interval=steps,
        eval_steps=settings.eval_steps,
        enable_checkpointing=False,
    )


def _width_keys(width: int) -> dict[str, int]:
    heads = width // _HEAD_DIM
    return {
        "base_emb_dim": width,
        "base_mlp_dim": round(width * _MLP_RATIO),
        "base_num_query_heads": heads,
        "base_num_kv_heads": heads,
    }


def _base_shape(settings: SweepSettings) -> BaseShape:
    sizes = _width_keys(settings.width) | {"base_num_decoder_layers": settings.depth}
    return BaseShape.of(sizes)


@functools.cache
def _batches(keys: str, seed: int, split: str) -> tuple[Batch, ...]:
    """Returns the batches of a seed, which are the same at every size."""
    config = unflatten(flatten(mt.load_config(CONFIGURATION)) | json.loads(keys))
    shuffled = unflatten(flatten(config) | {"data_shuffle_seed": seed})
    count = config.run.steps if split == "train" else config.evaluation.eval_steps
    return tuple(itertools.islice(mt.batches(shuffled, split), count))


def batches_of(config: Config, seed: int, split: str) -> tuple[Batch, ...]:
    """Returns the batches of a run or of its evaluation."""
    names = ("steps", "max_target_length", "eval_steps", "eval_interval")
    keys = flatten(config)
    return _batches(json.dumps({name: keys[name] for name in names}), seed, split)


class Trainer:
    """Trains a model at any learning rate, with one compiled step.

    Args:
      config: Of the model.
    """

    def __init__(self, config: Config):
        self._config = config
        model_config, _ = backend_defaults.resolve_auto(config.model, jax.default_backend())
        model = Model(model_config)
        schedule = learning_rate_schedule(config.schedule)

        def step(state: TrainState, batch: Batch, factor: jax.Array) -> TrainState:
            def scaled(count: jax.typing.ArrayLike) -> jax.Array:
                return factor * jax.numpy.asarray(schedule(count))

            optimizer = make_optimizer(config.optimizer, scaled, model.parameters)
            state, _ = make_train_step(model, optimizer, scaled)(state, batch)
            return state

        optimizer = make_optimizer(config.optimizer, schedule, model.parameters)
        self._initialize = jax.jit(make_initialize(model, optimizer))
        self._step = jax.jit(step, donate_argnums=0)
        self._eval_step = jax.jit(make_eval_step(model))

    def loss(self, factor: float, seed: int) -> float | None:
        """Trains from a seed; returns the validation loss per token, None if it is not finite.

        Args:
          factor: Of the learning rate.
          seed: Of initial weights and data order.
        """
        state = self._initialize(jax.random.key(seed))
        for batch in batches_of(self._config, seed, "train"):
            state = self._step(state, batch, np.float32(factor))
        # The same text for all seeds.
        report = evaluate(
            self._eval_step, state.params, batches_of(self._config, 0, "eval"), step=0
        )
        loss = report.total_loss / report.total_weights
        return loss if math.isfinite(loss) else None


def sweep(
    cell: Cell,
    seeds: Sequence[int],
    losses: Losses,
    loss_of: Callable[[float, int], float | None],
) -> Iterator[Point]:
    """Trains what is missing of a sweep into `losses`; yields each run after it.

    Args:
      cell: Of the runs.
      seeds: Every rate is trained from all of them.
      losses: Known and new losses.
      loss_of: Factor and seed to the loss of a run.
    """
    for number in itertools.count():
        factors = factors_of_round(number, mean_losses(cell, seeds, losses))
        if not factors:
            return
        for factor, seed in itertools.product(factors, seeds):
            point = Point(cell, factor, seed)
            if point not in losses:
                losses[point] = loss_of(factor, seed)
                yield point


def losses_of_seed(cell: Cell, seed: int, losses: Losses) -> dict[float, float | None]:
    """Returns factor of the rate -> loss of the runs of one seed, ascending."""
    return {
        point.factor: loss
        for point, loss in sorted(losses.items(), key=lambda item: item[0])
        if (point.cell, point.seed) == (cell, seed)
    }


def mean_losses(cell: Cell, seeds: Sequence[int], losses: Losses) -> dict[float, float | None]:
    """Returns factor -> mean loss over seeds; None if one diverged. Only complete factors."""
    by_seed = [losses_of_seed(cell, seed, losses) for seed in seeds]
    complete = set.intersection(*(set(of_seed) for of_seed in by_seed))
    means: dict[float, float | None] = {}
    for factor in sorted(complete):
        numbers = [of_seed[factor] for of_seed in by_seed]
        known = [number for number in numbers if number is not None]
        means[factor] = float(np.mean(known)) if len(known) == len(numbers) else None
    return means


class SizeOptimum(NamedTuple):
    """The optimum of a size."""

    log2_factor: Estimate  # log2 of the optimal factor, over seeds
    edge: int  # -1 or 1 if the mean loss is least at the smallest or largest factor
    loss: float  # least mean loss of a factor
    excess: float | None  # mean loss at the best factor of the smallest size, less the least one


def optima_of(
    cells: Mapping[int, Cell], seeds: Sequence[int], losses: Losses
) -> dict[int, SizeOptimum]:
    """Returns the optimum of every size that has complete runs.

    A size whose sweep has not ended is left out.

    Args:
      cells: Size -> models, ascending; see `cells_of_axis`.
      seeds: Those of all sizes.
      losses: Of all runs.
    """
    optima: dict[int, SizeOptimum] = {}
    transferred = None
    for size, cell in cells.items():
        means = mean_losses(cell, seeds, losses)
        known = {factor: loss for factor, loss in means.items() if loss is not None}
        if len(means) < len(FACTORS) or not known:
            continue
        logs = []
        for seed in seeds:
            of_seed = losses_of_seed(cell, seed, losses)
            complete = {factor: of_seed[factor] for factor in means}
            logs.append(math.log2(find_optimum(complete).factor))
        best = min(known, key=known.__getitem__)
        transferred = transferred or best
        there = means.get(transferred)
        optima[size] = SizeOptimum(
            log2_factor=Estimate.of(logs),
            edge=find_optimum(means).edge,
            loss=known[best],
            excess=None if there is None else there - known[best],
        )
    return optima


def movement(optima: Mapping[int, SizeOptimum]) -> float:
    """Returns by how many factors of two the mean optima of all sizes differ at most."""
    logs = [optimum.log2_factor.mean or 0.0 for optimum in optima.values()]
    return max(logs) - min(logs)


def report_lines(settings: SweepSettings, seeds: Sequence[int], losses: Losses) -> list[str]:
    """Returns a table of each axis in Markdown, with a row per recipe and size."""
    lines = []
    for axis in AXES:
        header = ["recipe", axis, "best rate", "interval", "loss"]
        header += ["excess at the first size's rate", "optima within"]
        rows = []
        for recipe in RECIPES:
            cells = cells_of_axis(recipe, axis, settings, losses)
            optima = optima_of(cells, seeds, losses)
            for size, optimum in optima.items():
                within = f"{2 ** movement(optima):.2f}x" if size == max(optima) else ""
                rows.append([recipe, str(size), *_optimum_cells(cells[size], optimum), within])
        if rows:
            lines += [f"## {axis}", "", *_markdown_rows([header, ["---"] * len(header), *rows]), ""]
    return lines


def _optimum_cells(cell: Cell, optimum: SizeOptimum) -> list[str]:
    """Returns rate, interval, loss and excess of a size."""
    estimate = optimum.log2_factor
    best, low, high = (
        "" if log is None else f"{RATES[cell.optimizer] * 2.0**log:.3g}"
        for log in (estimate.mean, estimate.ci_low, estimate.ci_high)
    )
    edge = {-1: " (the smallest)", 0: "", 1: " (the largest)"}[optimum.edge]
    excess = "not tried" if optimum.excess is None else f"{optimum.excess:.3f}"
    return [best + edge, f"{low} to {high}", f"{optimum.loss:.4f}", excess]


def _markdown_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in rows]


def draw(
    recipe: str,
    axis: AxisOfSizes,
    settings: SweepSettings,
    seeds: Sequence[int],
    losses: Losses,
) -> bytes | None:
    """Draws loss over learning rate, a curve per size with the range of the seeds."""
    cells = cells_of_axis(recipe, axis, settings, losses)
    rate = RATES[recipe.split("/")[1]]
    series = []
    for index, size in enumerate(optima_of(cells, seeds, losses)):
        by_factor = defaultdict(list)
        for seed in seeds:
            of_seed = losses_of_seed(cells[size], seed, losses)
            for factor, loss in of_seed.items():
                by_factor[factor].append(math.nan if loss is None else loss)
        numbers = [by_factor[factor] for factor in sorted(by_factor)]
        series.append(
            Series(
                label=f"{axis} {size}",
                owner=f"{axis} {size}",
                color=index,
                kind="dots",
                x={"learning_rate": np.array(sorted(by_factor)) * rate},
                y=np.array([np.mean(of_rate) for of_rate in numbers]),
                low=np.array([min(of_rate) for of_rate in numbers]),
                high=np.array([max(of_rate) for of_rate in numbers]),
            )
        )
    chart = Chart(
        name=f"{recipe.replace('/', '_')}_{axis}",
        title="validation loss over learning rate",
        y_title="nats per token",
        series=series,
        log_x=True,
    )
    return draw_chart(chart, Axis("learning_rate", "learning rate", ""), recipe)


def read(path: Path, settings: SweepSettings) -> Losses:
    """Returns the runs of a file; exits if they were made with other settings."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["settings"] != dataclasses.asdict(settings):
        sys.exit(f"{path} has runs with {content['settings']}: use another folder")
    return {
        Point(Cell(row["recipe"], row["axis"], row["size"]), row["factor"], row["seed"]): row[
            "loss"
        ]
        for row in content["runs"]
    }


def write(path: Path, settings: SweepSettings, losses: Losses) -> None:
    """Writes all runs."""
    runs = [
        {**point.cell._asdict(), "factor": point.factor, "seed": point.seed, "loss": loss}
        for point, loss in sorted(losses.items(), key=lambda item: item[0])
    ]
    content = {"settings": dataclasses.asdict(settings), "rates": RATES, "runs": runs}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(content, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--widths", nargs="+", type=int, default=(64, 128, 256, 512))
    parser.add_argument("--depths", nargs="+", type=int, default=(2, 4, 8, 16))
    parser.add_argument("--tokens", nargs="+", type=int, default=(1, 4, 16), help="multiples")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--report", action="store_true", help="train nothing")
    for field in dataclasses.fields(SweepSettings):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    return parser.parse_args()


def main() -> None:
    """Trains what is missing, and writes table and charts."""
    arguments = _arguments()
    settings = SweepSettings(
        **{
            field.name: getattr(arguments, field.name)
            for field in dataclasses.fields(SweepSettings)
        }
    )
    path = arguments.folder / "transfer.json"
    losses = read(path, settings)
    seeds = range(arguments.seeds)
    sizes = {"width": arguments.widths, "depth": arguments.depths, "tokens": arguments.tokens}
    # Small sizes of all recipes first, so that an interrupted command shows something of each.
    cells = [
        cell_of(recipe, axis, size, settings)
        for axis in arguments.axes
        for size in sorted(sizes[axis])
        for recipe in arguments.recipes
    ]
    for cell in () if arguments.report else cells:
        make_trainer = functools.cache(functools.partial(Trainer, configure(cell, settings)))
        for point in sweep(cell, seeds, losses, lambda f, s, make=make_trainer: make().loss(f, s)):
            print(*point.cell, point.factor, point.seed, losses[point], flush=True)
            write(path, settings, losses)
        jax.clear_caches()
    lines = report_lines(settings, seeds, losses)
    print(*lines, sep="\n")
    atomic_write_text(arguments.folder / "transfer.md", "\n".join(lines) + "\n")
    for recipe, axis in itertools.product(arguments.recipes, arguments.axes):
        image = draw(recipe, axis, settings, seeds, losses)
        if image is not None:
            name = f"transfer_{recipe.replace('/', '_')}_{axis}.png"
            atomic_write_bytes(arguments.folder / name, image)


if __name__ == "__main__":
    main()
