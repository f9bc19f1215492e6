"""Coordinate check: do activations and their updates depend on the size of the model?

A model is trained for a few steps at several widths (or depths) from several seeds, on one batch.
Under a parametrization that transfers, the root mean squares (rms) of activations, scores and
logits, and of their changes since step 0, stay as they are; the slope of ln rms on ln width is 0
(Yang et al. 2022, arXiv 2203.03466, appendix D.1). A slope of 0 is needed for hyper-parameters to
transfer, and not sufficient.

A quantity passes if the whole interval of its slope is within the tolerance: few seeds do not pass
because they say little. At finite widths, terms that fall as width^-1/2 give slopes up to 0.05
between 64 and 512; under the standard parametrization changes have slopes of 0.5 to 1.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.config.base_shape import BaseShape
from MaxText.config.layer_sections import DELTA_MIXERS
from MaxText.config.model_sections import ModelConfig
from MaxText.config.schema import Config, flatten, unflatten
from MaxText.errors import UserError
from MaxText.experiments.seed_statistics import CONFIDENCE
from MaxText.experiments.solver import validation_errors
from MaxText.formatting import format_table
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.layers.capture import capturing
from MaxText.layers.params import Params
from MaxText.reports.chart import Axis, Chart, Series, draw_chart
from MaxText.storage.atomic import atomic_write_bytes
from MaxText.training import backend_defaults
from MaxText.training.optimizer import make_optimizer
from MaxText.training.schedule import learning_rate_schedule
from MaxText.training.step import make_initialize, make_train_step

Size = Literal["width", "depth"]
# Captured values: scores before the softmax, what parts return, the residual stream, logits.
_PATTERNS = (
    "*/scores",
    "*/router_logits",
    "*/mixer_output",
    "*/feed_forward_output",
    "token_embedder/output",
    "layers/*/output",
    "decoder_norm/output",
    "head/output",
)
# Products with initial readouts, of size 1 / width, and of initial queries with keys shrink.
_SHRINKING = ("scores", "router_logits", "head/output")
# Few tokens: of an update of Adam, the part that adds up over the width is about
# sqrt(width / tokens) times the random rest, which shrinks with the width.
_BATCH_SIZE = 1
_LARGEST_LENGTH = 16
_LARGEST_VOCABULARY = 256
# Keys of widths that grow in proportion to the width of the model, if they are set.
_PROPORTIONAL_KEYS = (
    "base_mlp_dim",
    "moe_mlp_dim",
    "shared_expert_mlp_dim",
    "slot_num",
    "qkv_slot_num",
    "proj_slot_num",
    "ffn_slot_num",
)
_PROPORTIONAL_HEADS = {  # of delta rules: key -> mixers that read it
    "linear_num_key_heads": {"gated_delta_net"},
    "linear_num_value_heads": DELTA_MIXERS,
}


@dataclasses.dataclass(frozen=True)
class CheckPlan:
    """What is trained.

    Attributes:
      widths: emb_dim of each model; the first is the base.
      depths: Layers of each model of the first width; the first is the base.
      seeds: Seeds of initial weights.
      num_steps: Steps after which activations are compared with those at the start.
      tolerance: Within which the interval of a slope has to be.
    """

    widths: Sequence[int]
    depths: Sequence[int]
    seeds: Sequence[int]
    num_steps: int
    tolerance: float


class Slope(NamedTuple):
    """Slope of ln rms on ln size, with Student's confidence interval."""

    slope: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Quantity:
    """The rms of one kind of activations, or of its change, over sizes.

    Attributes:
      name: Such as "layers/*/mixer_output"; the mean over layers.
      is_change: Whether it is the change after the last step, or the value at the start.
      rms: Size -> one number per seed.
      size: What differs.
    """

    name: str
    is_change: bool
    rms: Mapping[int, Sequence[float]]
    size: Size = "width"

    @property
    def label(self) -> str:
        """What it is, for tables and charts."""
        return f"change of {self.name}" if self.is_change else self.name

    @property
    def may_shrink(self) -> bool:
        """Whether only growth is wrong: of logits and scores, and of all activations with depth.

        With the multiplier 1 / layers, the sum of what initial branches return shrinks, too.
        """
        return self.size == "depth" or self.name.endswith(_SHRINKING)

    def slope(self) -> Slope:
        """Returns the slope over all sizes and seeds."""
        sizes = [size for size, numbers in self.rms.items() for _ in numbers]
        numbers = [number for numbers in self.rms.values() for number in numbers]
        return fit_slope(np.log(sizes), np.log(numbers))

    def passes(self, tolerance: float) -> bool:
        """Returns whether the whole interval of the slope is within the tolerance.

        So a wide interval does not pass.
        """
        slope = self.slope()
        if not math.isfinite(slope.slope):
            return False
        return slope.high <= tolerance and (self.may_shrink or slope.low >= -tolerance)

    def is_uncertain(self, tolerance: float) -> bool:
        """Returns whether the slope is within the tolerance, and its interval is not."""
        slope = self.slope().slope
        is_within = slope <= tolerance and (self.may_shrink or slope >= -tolerance)
        return is_within and not self.passes(tolerance)


def fit_slope(x: np.ndarray, y: np.ndarray) -> Slope:
    """Returns the slope of a least-squares line with Student's interval.

    Args:
      x: Positions [N], at least three, of at least two values.
      y: Numbers [N]; a slope is nan if one of them is not finite.
    """
    # scipy.special, because scipy.stats takes a second to import.
    from scipy.special import stdtrit

    centered = x - x.mean()
    squares = float((centered**2).sum())
    slope = float((centered * y).sum()) / squares
    residuals = y - y.mean() - slope * centered
    error = math.sqrt(float((residuals**2).sum()) / (len(x) - 2) / squares)
    half = float(stdtrit(len(x) - 2, 0.5 + CONFIDENCE / 2)) * error
    return Slope(slope, slope - half, slope + half)


def sizes_at_width(model: ModelConfig, width: int, smallest: int) -> dict[str, int]:
    """Returns the keys of a model's sizes at another width, in proportion.

    All widths share one head_dim: that of the model, or a smaller power of two so that there are
    two heads or more at the smallest width. The number of heads is in proportion. As many of them
    share a key/value head at all widths: as in the model, or fewer if the smallest width has too
    few heads.

    Args:
      model: The model.
      width: emb_dim.
      smallest: The smallest width.
    """
    dimensions = model.shape.dimensions
    largest_head = min(dimensions.head_dim, max(smallest // 2, 2))
    head_dim = 2 ** int(math.log2(largest_head))
    query_width = dimensions.num_query_heads * dimensions.head_dim / dimensions.emb_dim
    smallest_num_heads = max(round(query_width * smallest / head_dim), 1)
    heads_per_kv_head = math.gcd(
        dimensions.num_query_heads // dimensions.num_kv_heads, smallest_num_heads
    )
    num_kv_heads = max(round(query_width * width / head_dim / heads_per_kv_head), 1)
    keys = model.values_by_key()
    factor = width / dimensions.emb_dim
    names = [name for name in _PROPORTIONAL_KEYS if keys[name] != -1]
    names += [
        name
        for name, mixers in _PROPORTIONAL_HEADS.items()
        if model.all_mixers.intersection(mixers)
    ]
    proportional = {name: max(round(keys[name] * factor), 1) for name in names}
    return proportional | {
        "global_parameter_scale": 1,
        "base_emb_dim": width,
        "base_num_query_heads": num_kv_heads * heads_per_kv_head,
        "base_num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def models_of(config: Config, plan: CheckPlan, size: Size) -> dict[int, Config]:
    """Returns the configuration of each width or depth.

    Vocabulary and length are cut, and the learning rate is constant from the first step.

    Args:
      config: Of the model.
      plan: Sizes and steps.
      size: What differs.

    Raises:
      UserError: A size is impossible.
    """
    shape = config.model.shape
    smallest = plan.widths[0]
    base_sizes = sizes_at_width(config.model, smallest, smallest)
    base_depth = plan.depths[0] if plan.depths else shape.dimensions.num_layers
    common = {
        "vocab_size": min(shape.vocab_size, _LARGEST_VOCABULARY),
        "max_target_length": min(shape.max_target_length, _LARGEST_LENGTH),
        "lr_schedule_type": "constant",
        "warmup_steps": 0,
        "steps": plan.num_steps,
        "enable_dropout": False,
        "dtype": "float32",
        "attention": "dot_product",
        "remat_policy": "none",
        "scan_layers": False,
    }
    if not config.model.is_standard:
        base = {name: number for name, number in base_sizes.items() if "scale" not in name}
        common["base_shape"] = BaseShape.of(
            base | ({"base_num_decoder_layers": base_depth} if config.model.has_depth_rule else {})
        )
    configs = {}
    for number in plan.widths if size == "width" else plan.depths:
        width, depth = (number, base_depth) if size == "width" else (smallest, number)
        sizes = sizes_at_width(config.model, width, smallest)
        keys = flatten(config) | common | sizes | {"base_num_decoder_layers": depth}
        configs[number] = unflatten(keys)
        if errors := validation_errors(configs[number]):
            raise UserError(f"{size} {number}: {errors[0]}")
    return configs


def measure(config: Config, plan: CheckPlan, size: Size) -> Iterator[tuple[str, bool, float]]:
    """Trains one model from each seed; yields (name, whether it is the change, rms).

    Args:
      config: From `models_of`.
      plan: Seeds and steps.
      size: What differs from model to model. Of depth, only the last layer is measured: the
        residual stream grows from layer to layer, so that a mean over them depends on their number.
    """
    model_config, _ = backend_defaults.resolve_auto(config.model, jax.default_backend())
    model = Model(model_config)
    schedule = learning_rate_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, model.parameters)
    initialize = make_initialize(model, optimizer)
    step = make_train_step(model, optimizer, schedule)
    batch = _batch(config)
    last_layer = f"/{config.model.shape.dimensions.num_layers - 1}/"

    def activations(params: Params) -> dict[str, jax.Array]:
        with capturing(_PATTERNS) as captured:
            model.merge(params)(batch)
        values = captured.values
        if size == "depth":
            is_measured = {
                path: last_layer in path or not path.startswith("layers/") for path in values
            }
            return {path: value for path, value in values.items() if is_measured[path]}
        return values

    # One program for all: compiling takes longer than a few steps.
    @jax.jit
    def rms_of_seed(key: jax.Array) -> list[dict[str, jax.Array]]:
        state = initialize(key)
        at_start = activations(state.params)
        state = jax.lax.fori_loop(
            0, plan.num_steps, lambda _, state: step(state, batch, {})[0], state
        )
        at_end = activations(state.params)
        changes = {path: at_end[path] - value for path, value in at_start.items()}
        return [_rms_over_layers(values) for values in (at_start, changes)]

    for seed in plan.seeds:
        for is_change, rms in enumerate(rms_of_seed(jax.random.key(seed))):
            yield from ((name, bool(is_change), float(value)) for name, value in rms.items())


def _batch(config: Config) -> Batch:
    """Returns a batch of random tokens, with targets that follow from them."""
    vocab_size = config.model.shape.vocab_size
    shape = (_BATCH_SIZE, config.model.shape.max_target_length)
    tokens_BT = np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32)
    targets_BT = (tokens_BT * 5 + 3) % vocab_size
    return Batch(jnp.asarray(tokens_BT), jnp.asarray(targets_BT), jnp.ones(shape, jnp.float32))


def _rms_over_layers(values: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the root mean square over all layers of each kind of values."""
    squares = collections.defaultdict(list)
    for path, value in values.items():
        kind = re.sub(r":\d+$", "", re.sub(r"/\d+/", "/*/", path))
        squares[kind].append(jnp.mean(jnp.square(value.astype(jnp.float32))))
    return {kind: jnp.sqrt(jnp.mean(jnp.stack(of_kind))) for kind, of_kind in squares.items()}


def check_size(
    config: Config, plan: CheckPlan, size: Size, log: Callable[[str], None]
) -> list[Quantity]:
    """Trains the model at each width or depth; returns its quantities.

    Those that are 0 at some size, such as products with weights that start at 0, are left out.

    Args:
      config: Of the model.
      plan: Sizes, seeds and steps.
      size: What differs.
      log: Gets a line per model.

    Raises:
      UserError: A size is impossible.
    """
    rms = collections.defaultdict(lambda: collections.defaultdict(list))
    for number, sized_config in models_of(config, plan, size).items():
        log(f"{size} {number}: {len(plan.seeds)} seeds, {plan.num_steps} steps")
        for name, is_change, value in measure(sized_config, plan, size):
            rms[name, is_change][number].append(value)
    quantities = [
        Quantity(name, is_change, by_size, size) for (name, is_change), by_size in rms.items()
    ]
    return [quantity for quantity in quantities if all(map(all, quantity.rms.values()))]


def table(quantities: Sequence[Quantity], size: Size, tolerance: float) -> str:
    """Returns the table of slopes."""
    header = ["activations", "smallest", "largest", f"slope in {size}", "interval", ""]
    rows = []
    for quantity in quantities:
        slope = quantity.slope()
        ends = [float(np.mean(numbers)) for numbers in quantity.rms.values()]
        accepted = "ok" if quantity.passes(tolerance) else "FAILED"
        if quantity.is_uncertain(tolerance):
            accepted = "uncertain"
        rows.append(
            [
                quantity.label,
                f"{ends[0]:.3g}",
                f"{ends[-1]:.3g}",
                f"{slope.slope:+.3f}",
                f"{slope.low:+.3f} to {slope.high:+.3f}",
                f"{accepted} (may shrink)" if quantity.may_shrink else accepted,
            ]
        )
    return format_table(header, rows)


def write_plot(quantities: Sequence[Quantity], size: Size, title: str, path: Path) -> None:
    """Draws log2 of the rms at the start, and of the changes, over sizes."""
    series = []
    for index, quantity in enumerate(quantities):
        logs = np.log2([[*numbers] for numbers in quantity.rms.values()])
        series.append(
            Series(
                label=quantity.label,
                owner=quantity.label,
                color=index,
                kind="dots",
                x={size: np.array([*quantity.rms], float)},
                y=logs.mean(1),
                low=logs.min(1),
                high=logs.max(1),
            )
        )
    chart = Chart(
        name=f"coordinates_{size}",
        title="activations at the start, and their change by training",
        y_title="log2 of the root mean square",
        series=series,
    )
    image = draw_chart(chart, Axis(size, size, size), title)
    if image is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, image)


def run_check(config: Config, plan: CheckPlan, output: Path, log: Callable[[str], None]) -> bool:
    """Checks widths, and depths if there are several; returns whether all slopes are 0.

    Args:
      config: Of the model.
      plan: Sizes, seeds and steps.
      output: Folder of the plots.
      log: Gets progress, tables and the verdict.

    Raises:
      UserError: A size is impossible.
    """
    parametrization = config.model.parametrization.parametrization
    failed = []
    uncertain = []
    sizes: list[Size] = ["width", "depth"] if plan.depths else ["width"]
    for size in sizes:
        quantities = check_size(config, plan, size, log)
        log(table(quantities, size, plan.tolerance))
        path = output / f"coordinates_{size}.png"
        write_plot(quantities, size, f"parametrization={parametrization}", path)
        log(f"Plot: {path}")
        for quantity in quantities:
            if quantity.is_uncertain(plan.tolerance):
                uncertain.append(f"{quantity.label} with {size}")
            elif not quantity.passes(plan.tolerance):
                failed.append(f"{quantity.label} with {size}")
    if failed:
        log(
            f"FAILED: {len(failed)} of the above change with the size under "
            f"parametrization={parametrization}, the first: {failed[0]}"
        )
    elif uncertain:
        log(
            f"Uncertain: {len(uncertain)} of the above have intervals wider than the tolerance, "
            f"the first: {uncertain[0]}. Set more seeds="
        )
    else:
        log(f"ok: no activations change with the size under parametrization={parametrization}")
    return not failed and not uncertain
