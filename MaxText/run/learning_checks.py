"""Warns of a run that cannot learn: it ends with exit code 0 and plausible numbers.

Most checks look at what was measured (targets, gradients, updates, moments), so that they see
causes that nobody thought of; a configuration key is named where it explains the measurement.
Nothing here waits for the device, except `check_gradients`, once in a run and once at its end.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.config.schema import Config
from MaxText.config.training_sections import ScheduleConfig
from MaxText.layers.batch import Batch
from MaxText.layers.params import Params
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.training.assembly import TrainSetup
from MaxText.training.state import TrainState
from MaxText.value_types import PyTree

# What holds for all of the first reports is reported at once, not at the end of a long run.
_EARLY_REPORTS = 8
_GRADIENT_CHECK_STEPS = 16  # steps of a start until the gradient of every parameter was seen
# Sum of the norms of all updates, relative to the norm of the parameters: far less than a single
# step at the smallest learning rates in use (1e-6) makes.
_NEGLIGIBLE_CHANGE = 1e-6
_KEPT_AXES = ("layers", "exp")  # along which a part of a parameter can lack a gradient
_MAX_LISTED = 8


def zero_rate_reason(schedule: ScheduleConfig, first_step: int, last_step: int) -> str:
    """Returns at which steps of a run the learning rate is 0, and why; "" for none.

    Single steps do not count: the first one of a warm-up, or the last one of a decay to 0.

    Args:
      schedule: The learning rate schedule.
      first_step: The first step of this start.
      last_step: The last step of the run.
    """
    end = schedule.learning_rate_schedule_steps
    is_constant = schedule.lr_schedule_type == "constant"
    stays_at_last_value = is_constant or schedule.learning_rate_decay.after == "final"
    if schedule.learning_rate == 0:
        return "the learning rate is 0 at every step (learning_rate=0): no parameter will change"
    if first_step == last_step == 0 and schedule.num_warmup_steps > 0:
        return (
            "the learning rate is 0 at the only step, because the warm-up starts at 0: no "
            "parameter will change. Set warmup_steps=0, or more steps"
        )
    if stays_at_last_value or last_step <= end:
        return ""
    remedy = (
        f"because learning_rate_schedule_steps={end} ends before. Raise it, or set "
        "learning_rate_decay.after=final"
    )
    if first_step > end:
        return f"the learning rate is 0 at every step from {first_step} to {last_step}, {remedy}"
    return f"the learning rate is 0 from step {end + 1} to the last step {last_step}, {remedy}"


def first_batch_reasons(batch: Batch, *, is_repeated: bool) -> list[str]:
    """Returns what is wrong with the first batch of this host, for the whole run.

    Args:
      batch: Arrays in host memory.
      is_repeated: Whether the run uses this batch for every step.
    """
    reasons = []
    if is_repeated:
        reasons.append("every step trains on the same batch (reuse_example_batch=true)")
    targets = np.asarray(batch.targets_BT)[np.asarray(batch.loss_mask_BT) > 0]
    ids = np.unique(targets)
    if len(ids) == 1 and len(targets) > 1:
        reasons.append(
            f"all {len(targets)} targets of the first batch are the token id {ids[0]}: there is "
            "nothing to learn. Check the data with inspect_data.py"
        )
    has_targets_B = (np.asarray(batch.loss_mask_BT) > 0).any(axis=1)
    tokens_BT = np.asarray(batch.tokens_BT)[has_targets_B]
    num_distinct = len(np.unique(tokens_BT, axis=0))
    if len(ids) > 1 and 4 * num_distinct <= 3 * len(tokens_BT):
        reasons.append(
            f"the first batch of {len(tokens_BT)} sequences has {num_distinct} distinct: the data "
            "hold less than one batch, so the loss will be that of memorized text"
        )
    return reasons


class _Warning(NamedTuple):
    """What is wrong with a run, by the name of the check, and since which report."""

    name: str
    step: int
    reason: str


class LearningChecks:
    """The checks of one start of a run; each reason is reported once, as an event "warning"."""

    def __init__(
        self,
        config: Config,
        setup: TrainSetup,
        sharding: ShardingPlan,
        emit: Callable[..., None],
        *,
        first_step: int,
        last_step: int,
    ):
        """Warns of steps with learning rate 0.

        Args:
          config: The configuration of the run.
          setup: Its model and optimizer.
          sharding: That of the train state.
          emit: EventLog.emit; gets the warnings.
          first_step: The first step of this start.
          last_step: The last step of the run.
        """
        self._config = config
        self._emit = emit
        self._specs = setup.model.parameters
        self._reads_opt_state = not config.mesh.optimizer_memory_host_offload
        self._jit = functools.partial(sharding.jit, out_shardings=sharding.replicated)
        self._reported: set[str] = set()
        self._first_step = first_step
        self._newest_step = first_step - 1
        self._gradients_checked = False
        self._num_reports = 0
        self._num_skipped: list[float] = []  # before the first report, and up to the newest one
        self._losses: set[float] = set()
        self._max: dict[str, float] = {}  # the largest value of each metric
        self._max_ratio = 0.0  # of update norm to parameter norm
        self._change = 0.0  # sum of that ratio over all steps
        self._decays_only = True  # whether all updates were as large as weight decay makes them
        if first_step <= last_step:
            reason = zero_rate_reason(config.schedule, first_step, last_step)
            if reason:
                self._report("schedule", first_step, reason)

    def check_first_batch(self, batch: Batch) -> None:
        """Warns of a first batch, in host memory, that nothing can be learned from."""
        is_repeated = self._config.data.reuse_example_batch
        for reason in first_batch_reasons(batch, is_repeated=is_repeated):
            self._report(reason, self._first_step, reason)

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Processes the metrics of a report; those of its step stand for all since the last one."""
        num_steps = max(step - self._newest_step, 1)
        self._newest_step = step
        self._num_reports += 1
        if "num_skipped" in metrics:
            self._num_skipped.append(metrics["num_skipped"])
            del self._num_skipped[1:-1]
        if metrics.get("skipped"):
            return  # nothing of it was applied
        for name in ("total_weights", "grad_norm", "update_norm", "learning_rate"):
            self._max[name] = max(self._max.get(name, 0.0), _finite(metrics[name]))
        if len(self._losses) < 2:
            self._losses.add(metrics["loss"])
        self._decays_only &= self._is_decay(metrics)
        ratio = _finite(metrics["update_norm"] / max(metrics["param_norm"], 1e-30))
        self._max_ratio = max(self._max_ratio, ratio)
        self._change += num_steps * ratio
        if self._num_reports == _EARLY_REPORTS:
            self._check_metrics(is_end=False)

    def gradients_due(self, step: int) -> bool:
        """Returns whether `check_gradients` is due after a step."""
        return not self._gradients_checked and step - self._first_step >= _GRADIENT_CHECK_STEPS

    def check_gradients(self, state: TrainState, *, is_end: bool = False) -> None:
        """Warns of parameters whose gradient was 0 in every step. Blocks on the device.

        The moments of the optimizer tell: they are 0 only if every gradient was. Optimizers without
        moments in the shape of the parameters say nothing.

        Args:
          state: The state after the newest step.
          is_end: Whether the run is at its end, where experts count, too.
        """
        has_experts = any("exp" in spec.logical_axes for spec in self._specs.values())
        if self._gradients_checked and not has_experts:
            return
        self._gradients_checked = True
        if not self._reads_opt_state or not self._max.get("grad_norm"):
            return  # a gradient of 0 everywhere is reported as such
        seen = _seen_gradients(state.params, state.opt_state, self._specs, self._jit)
        dead = []
        idle = []
        for name, seen_LE in seen.items():
            axes = self._specs[name].logical_axes
            if not seen_LE.any():
                dead.append(name)
                continue
            expert_axis = _kept_axes(axes).index("exp") if "exp" in axes else None
            seen_L = seen_LE if expert_axis is None else seen_LE.any(axis=expert_axis)
            if not seen_L.all():
                layers = ", ".join(map(str, np.flatnonzero(~seen_L)))
                dead.append(f"{name} (layers {layers})")
            elif expert_axis is not None and is_end and not seen_LE.all():
                idle.append(f"{name}: {int((~seen_LE).sum())} of {seen_LE.size}")
        if dead:
            self._report(
                "dead",
                self._newest_step,
                "the gradient of these parameters was exactly 0 in every step so far, so they do "
                f"not learn: {_listed(dead)}. {self._blocking_keys()}",
            )
        if idle:
            self._report(
                "experts",
                self._newest_step,
                f"some experts got no token in the whole run, so they did not learn: "
                f"{_listed(idle)}. Raise load_balance_loss_weight, set routed_bias, or train on "
                "more tokens",
            )

    def finish(self, state: TrainState) -> None:
        """Warns at the end of a run; `state` is the final one."""
        if self._num_reports == 0:
            return
        self._check_metrics(is_end=True)
        self.check_gradients(state, is_end=True)

    def _report(self, name: str, step: int, reason: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._emit("warning", step=step, reason=reason)

    def _check_metrics(self, *, is_end: bool) -> None:
        """Reports the first cause in the chain from targets to parameters."""
        cause = self._cause(is_end=is_end)
        if cause is not None:
            self._report(cause.name, cause.step, cause.reason)

    def _cause(self, *, is_end: bool) -> _Warning | None:
        """Returns why the parameters do not learn, or None if they seem to.

        Args:
          is_end: Whether all reports of the run are in; before, a few are.
        """
        if not self._max:
            if not is_end:
                return None
            count = self._num_skipped[-1] - self._num_skipped[0] + 1
            reason = f"every reported step was skipped ({count:.0f} or more in all)"
            return _Warning("skipped", self._newest_step, f"{reason}: no parameter changed")
        return self._cause_of_applied_steps(is_end=is_end)

    def _cause_of_applied_steps(self, *, is_end: bool) -> _Warning | None:
        """Returns the first broken link from targets to parameters, or None if all hold."""
        step = self._newest_step
        reports = f"all {self._num_reports} reports"
        if not self._max["total_weights"]:
            return _Warning("targets", step, self._no_targets(reports))
        if "schedule" in self._reported and not self._max["learning_rate"]:
            return None  # said before the first step
        if not self._max["grad_norm"]:
            return _Warning("gradient", step, self._no_gradient(reports))
        if len(self._losses) == 1 and self._num_reports > 2 and self._max["update_norm"]:
            (loss,) = self._losses
            return _Warning(
                "loss",
                step,
                f"the loss was exactly {loss:.6g} in {reports} though parameters changed: it does "
                "not depend on them. Check initializations of 0, and parts of your own",
            )
        if not self._max["learning_rate"]:
            reason = f"the learning rate was 0 in {reports}: no parameter changed"
            return _Warning("rate", step, reason)
        if not self._max["update_norm"]:
            return _Warning("updates", step, self._no_updates(reports))
        if self._decays_only:
            return _Warning(
                "decay",
                step,
                f"weight decay alone changed the parameters in {reports}: the gradient's part of "
                f"the updates is 0. {self._small_keys()}",
            )
        if is_end:
            return self._too_small()
        return None

    def _is_decay(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether an update has the norm of weight decay alone.

        Only for decay of all parameters, next to updates of normalized gradients: other optimizers
        may have gradients too small to show in the norm.
        """
        optimizer = self._config.optimizer
        rate = metrics["learning_rate"]
        partial = (
            optimizer.adamw_mask
            or optimizer.weight_decay_overrides
            or optimizer.cautious_weight_decay
            or self._config.schedule.weight_decay_schedule_type != "constant"
        )
        frozen = optimizer.learning_rate_overrides or optimizer.trainable_parameters_mask
        if optimizer.opt_type not in ("adamw", "lion", "muon") or partial or frozen or not rate:
            return rate == 0
        decay = rate * optimizer.adam_weight_decay
        if not 0 < decay < 1:
            return False
        of_decay = decay * metrics["param_norm"] / (1 - decay)  # the norm is that after the update
        return abs(metrics["update_norm"] - of_decay) < 1e-4 * of_decay

    def _no_targets(self, reports: str) -> str:
        masking = self._config.masking
        if masking.mlm_training:
            cause = (
                f"mlm.mask_prob={masking.mlm.mask_prob:g} and mlm.mask_ignore_ids leave no token "
                "to predict"
            )
        else:
            cause = (
                "every target is padding or ignored. Documents of one token have no next token, "
                "and labels may all be ignored. Check the data with inspect_data.py"
            )
        return f"no step had a target token in {reports}, so the loss of 0 means nothing: {cause}"

    def _no_gradient(self, reports: str) -> str:
        text = f"the gradient was exactly 0 in {reports}"
        if self._max["update_norm"]:
            text += ", so weight decay alone changed the parameters"
        return f"{text}. {self._blocking_keys()}"

    def _blocking_keys(self) -> str:
        """Names what can make a gradient 0."""
        causes = "an initialization or a coefficient of 0, a stopped gradient, saturated logits"
        if self._config.model.dropout.dropout_rate > 0.9:
            causes = f"dropout_rate={self._config.model.dropout.dropout_rate:g}, {causes}"
        return f"The loss does not depend on them. Possible causes: {causes}"

    def _no_updates(self, reports: str) -> str:
        optimizer = self._config.optimizer
        frozen = [pattern for pattern, factor in optimizer.learning_rate_overrides if factor == 0]
        text = f"all updates were exactly 0 in {reports}, so no parameter changed"
        if frozen:
            return f"{text}: learning_rate_overrides freeze {', '.join(frozen)}"
        return f"{text}, though gradient and learning rate were not 0. {self._small_keys()}"

    def _too_small(self) -> _Warning | None:
        """Returns a warning of updates that are lost in rounding, or add up to nothing."""
        step = self._newest_step
        dtype = self._config.model.numerics.weight_dtype
        spacing = float(jnp.finfo(dtype).eps)
        if self._max_ratio < spacing / 4:
            return _Warning(
                "rounding",
                step,
                f"updates were at most {self._max_ratio:.1e} of the parameters (norms), less than "
                f"{dtype} can resolve ({spacing:.1e}): most are rounded away. {self._small_keys()}",
            )
        if self._change < _NEGLIGIBLE_CHANGE:
            return _Warning(
                "change",
                step,
                f"all updates together were {self._change:.1e} of the parameters (norms): the "
                f"model is the one it started with. {self._small_keys()}",
            )
        return None

    def _small_keys(self) -> str:
        """Names the keys that make updates small."""
        config = self._config
        keys = [f"learning_rate={config.schedule.learning_rate:g}"]
        threshold = config.optimizer.gradient_clipping_threshold
        if 0 < threshold < 1e-3 * max(self._max["grad_norm"], 1e-30):
            keys.append(f"gradient_clipping_threshold={threshold:g}")
        if config.optimizer.learning_rate_overrides:
            keys.append("learning_rate_overrides")
        if config.model.numerics.weight_dtype != "float32":
            keys.append(f"weight_dtype={config.model.numerics.weight_dtype}")
        return f"Check {', '.join(keys)}"


def _finite(value: float) -> float:
    """Returns a number that shows that something was not 0, if it is not finite."""
    return value if math.isfinite(value) else 1.0


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"


def _kept_axes(axes: Sequence[str | None]) -> list[str]:
    return [axis for axis in axes if axis in _KEPT_AXES]


def _seen_gradients(
    params: Params,
    opt_state: PyTree,
    specs: Mapping[str, ParamSpec],
    jit: Callable[..., Any],
) -> dict[str, np.ndarray]:
    """Returns where moments are not 0, by parameter with moments; bool [layers, experts].

    Axes that a parameter lacks are missing.

    Args:
      params: The parameters.
      opt_state: The state of the optimizer, whose leaves with the path and shape of a parameter are
        its moments.
      specs: Name -> logical axes of each parameter.
      jit: Compiles a function; its result is on every process.
    """
    shapes = {name: leaf.shape for name, leaf in _named_leaves(params) if name in specs}
    moments: dict[str, list[jax.Array]] = {}
    for path, leaf in _named_leaves(opt_state):
        parts = path.split("/")
        suffixes = ("/".join(parts[start:]) for start in range(1, len(parts)))
        name = next((suffix for suffix in suffixes if suffix in shapes), None)
        if name is not None and getattr(leaf, "shape", None) == shapes[name]:
            moments.setdefault(name, []).append(leaf)

    def any_nonzero(moments: Mapping[str, Sequence[jax.Array]]) -> dict[str, jax.Array]:
        def seen(name: str, leaf: jax.Array) -> jax.Array:
            logical_axes = specs[name].logical_axes
            axes = enumerate(logical_axes)
            reduced = tuple(axis for axis, logical in axes if logical not in _KEPT_AXES)
            return jnp.any(leaf != 0, axis=reduced)

        return {
            name: functools.reduce(jnp.logical_or, [seen(name, leaf) for leaf in leaves])
            for name, leaves in moments.items()
        }

    seen = jax.device_get(jit(any_nonzero)(moments))
    return {name: np.asarray(value) for name, value in seen.items()}


def _named_leaves(tree: PyTree) -> list[tuple[str, jax.Array]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
