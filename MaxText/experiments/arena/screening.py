"""What a candidate has to pass before it is trained."""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.config import registry
from MaxText.config.loading import load_config
from MaxText.config.registry import Registration
from MaxText.config.schema import Config
from MaxText.config.values import UntypedValue
from MaxText.conformance.checks import CHECKS, OPTIMIZER_CHECKS, find_problem
from MaxText.conformance.subject import SIZES, TRAINED, Subject, random_batch
from MaxText.errors import first_line, raising_line
from MaxText.experiments.arena.candidates import Candidate
from MaxText.experiments.arena.counted_cost import (
    counted_config,
    misreported_flops,
    trace_program,
)
from MaxText.experiments.arena.information_leaks import find_leaks, target_losses
from MaxText.experiments.arena.isolation import source_files
from MaxText.formatting import byte_count
from MaxText.layers.batch import Batch
from MaxText.layers.params import Params

# Checks of check_part.py that a cheat fails, and an honest part that is not finished yet passes.
_CHECKS = ("initialization", "causality", "documents", "padding", "FLOPs")
# Arrays in a program, besides weights: masks and tables of an honest model are computed there.
_MAX_CONSTANTS = 2**20
_NUM_SEQUENCES = 2
_NOISE = 0.02  # added to initial weights, as zeros hide what a model reads


def screen(candidate: Candidate) -> list[str]:
    """Returns the reasons to refuse a candidate; empty if there are none.

    Traces and compiles the candidate's own parts in a small model, and the whole model at its own
    size on one CPU device.

    Args:
      candidate: In the process that read it.
    """
    reasons: list[str] = []
    try:
        reasons += _conformance_reasons(candidate.parts)
        if not reasons:
            reasons += program_reasons(candidate.config)
    except Exception as error:  # the code of a candidate can raise anything
        file = next(iter(candidate.files), "")
        reasons.append(
            f"{type(error).__name__}: {first_line(error)} (at {raising_line(error, file)})"
        )
    new_files = [path for path in source_files() if path not in candidate.files]
    reasons += [
        f"it imports {path} only while it runs; import it at the top of a file"
        for path in new_files
        if candidate.guard.watch.is_candidates(path)
    ]
    return [*candidate.guard.problems(), *dict.fromkeys(reasons)]


def _conformance_reasons(parts: Sequence[Registration]) -> list[str]:
    """Returns the violations of check_part.py's checks by parts of the user's own.

    Args:
      parts: Of one configuration. They are checked together, as some need each other; of several
        parts of a kind, which are those of different layers, each is.
    """
    first_of_kind = {part.kind: part for part in reversed(parts)}
    reasons = [
        f"{part.name} is a data source, and the data belong to the session"
        for part in parts
        if part.kind == "data_source"
    ]
    combinations = {tuple({**first_of_kind, part.kind: part}.values()) for part in parts}
    for combination in combinations if not reasons else ():
        reasons += _reasons_of_combination(combination)
    return reasons


def _reasons_of_combination(parts: Sequence[Registration]) -> list[str]:
    """Returns the violations of parts of different kinds, in one small model."""
    choices = {registry.KINDS[part.kind]: part.name for part in parts}
    files = [part.location.rpartition(":")[0] for part in parts]

    def small_config(**overrides: UntypedValue) -> Config:
        """Returns the configuration of a small model with the parts."""
        keys = SIZES | choices | overrides
        with contextlib.redirect_stderr(io.StringIO()):  # notices, of each of many configurations
            return load_config(**TRAINED | keys)

    subject = Subject(small_config, decodes=False)
    checks = [check for check in CHECKS if check.name in _CHECKS]
    if all(part.kind == "optimizer" for part in parts):
        checks = [check for check in OPTIMIZER_CHECKS if check.name in _CHECKS]
    descriptions: dict[str, str] = {}  # problem -> names of the checks that have found it
    for check in checks:
        problem = find_problem(check, subject, files[0])
        if problem is not None:
            line = f"{problem.description}; {problem.remedy}"
            earlier = descriptions.get(line)
            descriptions[line] = check.name if earlier is None else f"{earlier}, {check.name}"
    named = " and ".join(f"{part.kind} {part.name}" for part in parts)
    return [f"{named}: the check of {names} fails: {line}" for line, names in descriptions.items()]


def program_reasons(config: Config) -> list[str]:
    """Returns what is wrong with a whole model, at its own size.

    Args:
      config: Of a run.
    """
    reasons = []
    program = trace_program(config)
    if names := program.host_computations:
        reasons.append(f"its step runs Python on the host: {', '.join(names)}")
    if hidden := program.operations.uncounted:
        reasons.append(f"its FLOPs cannot be counted: {', '.join(hidden)}")
    constant_bytes = sum(array.nbytes for array in program.constants)
    if constant_bytes > _MAX_CONSTANTS:
        reasons.append(
            f"its program holds arrays of {byte_count(constant_bytes)} besides its weights; "
            "declare them as weights, or compute them"
        )
    if reasons:
        return reasons
    if (misreported := misreported_flops(config)) is not None:
        reasons.append(misreported)
    return reasons + model_leaks(config)


def model_leaks(config: Config) -> list[str]:
    """Returns what positions of a model see that they may not see, with noisy initial weights.

    Args:
      config: Of a run.
    """
    counted = counted_config(config)
    program = trace_program(config)
    model = program.setup.model
    batch = jax.tree.map(np.asarray, random_batch(counted, _NUM_SEQUENCES))
    batch = dataclasses.replace(batch, loss_mask_BT=np.ones_like(batch.loss_mask_BT))
    if counted.data.cross_document_attention:
        batch = dataclasses.replace(batch, positions_BT=None, segments_BT=None)
    compiled = jax.jit(functools.partial(target_losses, model))
    params = jax.jit(functools.partial(_noisy, model.initialize))(jax.random.key(0))

    def losses(params: Params, batch: Batch) -> jax.Array:
        return compiled(params, jax.tree.map(jnp.asarray, batch))

    return find_leaks(losses, params, batch, dtype=model.config.numerics.dtype)


def _noisy(initialize: Callable[[jax.Array], Params], key: jax.Array) -> Params:
    """Returns initial weights with noise, so that no weight is zero."""
    leaves, structure = jax.tree.flatten(initialize(key))
    keys = jax.random.split(key, len(leaves))
    noisy = [
        leaf + _NOISE * jax.random.normal(noise_key, leaf.shape, leaf.dtype)
        for leaf, noise_key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, noisy)
