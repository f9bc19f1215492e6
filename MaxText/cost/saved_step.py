"""Saves a compiled step to a file, and loads it for a matching run."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import serialize_executable

from MaxText.config.model_sections import ModelConfig
from MaxText.config.schema import Config
from MaxText.cost import serialized_executable, step_fingerprint
from MaxText.cost.lowering import LoweredStep
from MaxText.errors import UserError
from MaxText.parallelism.mesh import ShardingPlan

_SHOWN = 8  # differences listed


def save_compiled(path: str, planned: LoweredStep, compiled: jax.stages.Compiled) -> str:
    """Writes a step for train.py; returns the signature."""
    try:
        executable, _, out_tree = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"compiled_trainstep_file={path}: jax cannot serialize this program ({error}). Remove "
            "the key; restarts use the compilation cache (jax_cache_dir)."
        ) from error
    _, metrics = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    facts = step_fingerprint.fingerprint(
        planned.config, planned.model.config, planned.sharding, planned.state
    )
    kept = {
        "run": facts,
        "batch": step_fingerprint.describe(planned.batch),
        "metrics": sorted(metrics),
    }
    return serialized_executable.write(path, kept, executable)


def load_compiled(
    config: Config, model_config: ModelConfig, sharding: ShardingPlan, state: Any
) -> Callable[[Any], Callable | None] | None:
    """Returns a function from batch shapes to the saved step, if any.

    `config` has the score zoom fixed, `model_config` has `auto` resolved. Raises UserError if the
    file is missing, unsigned, or for another configuration, program or machine, before executing
    any of it.
    """
    path = config.run.compiled_trainstep_file
    if not path:
        return None
    kept, executable = serialized_executable.read(path)
    different = step_fingerprint.differences(
        kept["run"], step_fingerprint.fingerprint(config, model_config, sharding, state)
    )
    if different:
        more = len(different) - _SHOWN
        lines = different[:_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise UserError(
            f"compiled_trainstep_file={path} was compiled for another run:\n"
            + "\n".join(f"    {line}" for line in lines)
            + "\n  What to do: compile again by train_compile.py with this configuration, or "
            "remove the key."
        )

    def step_for(batch: Any) -> Callable | None:
        if step_fingerprint.describe(batch) != kept["batch"]:
            return None
        out_tree = jax.tree.structure((state, dict.fromkeys(kept["metrics"], 0)))
        devices = list(sharding.mesh.devices.flat)
        try:
            return serialize_executable.deserialize_and_load(
                executable,
                jax.tree.structure(((state, batch), {})),
                out_tree,
                backend=devices[0].client,
                execution_devices=devices,
            )
        except Exception as error:  # runtimes raise anything
            raise UserError(
                f"compiled_trainstep_file={path}: the runtime of these devices "
                f"({devices[0].device_kind}) rejects it: {str(error).splitlines()[0]}\n"
                "  What to do: compile it with the versions installed here, or remove the key."
            ) from error

    return step_for
