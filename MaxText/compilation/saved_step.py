"""Saves compiled steps to files, and loads them for matching runs.

train_compile.py writes compiled_trainstep_file. A run on one CPU also keeps its steps next to the
compilation cache: the next start need not trace them, which takes longer than loading them.

Loading one executes its contents: machine code and JAX's pickle around it. So nothing is unpickled
before the signature is verified, an HMAC-SHA256 under the user's key: anybody could compute a mere
checksum. The file:

    MaxText compiled step 1       a line
    signature                     a line, hexadecimal, of all that follows
    facts                         a line of JSON: what it was compiled for and from
    executable                    the rest
"""

import contextlib
import functools
import hashlib
import hmac
import importlib.metadata
import json
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.experimental import serialize_executable

import MaxText
from MaxText.compilation import compilation_cache
from MaxText.compilation.compiled_steps import SavedSteps
from MaxText.compilation.lowering import LoweredStep
from MaxText.config.model_sections import ModelConfig
from MaxText.config.schema import flatten, keys_by_section
from MaxText.config.training_sections import RunConfig
from MaxText.config.values import to_yaml
from MaxText.errors import UserError
from MaxText.growth.resolve import ResolvedGrowth
from MaxText.layers.batch import Batch
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.storage.atomic import atomic_write_bytes
from MaxText.storage.paths import is_object_store_path, parse_path
from MaxText.training.model_objective import frozen_models
from MaxText.training.state import TrainState
from MaxText.value_types import PyTree

_FIRST_LINE = b"MaxText compiled step 1\n"
KEY_VARIABLE = "MAXTEXT_SIGNING_KEY_FILE"
_KEY_BYTES = 32
_MAX_LISTED_DIFFERENCES = 8
# Sections and single keys that determine a step.
_SECTIONS = ("model", "batch", "optimizer", "schedule", "mesh")
_KEYS = (
    "skip_step_on_spikes",
    "skip_step_interval",
    "skip_step_scaling_factor",
    "rollback.after_skips",
    "rollback.on_rise",
    "log_layer_metrics",
)

# Sources that a step is traced from.
_SOURCES = (
    "layers/**/*.py",
    "training/**/*.py",
    "parallelism/logical_sharding.py",
    "parallelism/mesh.py",
)

# Flags that change output paths or autotuning, but not the program.
_OTHER_FLAGS = r"--xla_(dump_\S*|gpu_autotune_level=\S*|force_host_platform_device_count=\S*)"


def save_compiled(path: str, planned: LoweredStep, compiled: jax.stages.Compiled) -> str:
    """Writes a compiled step to a signed file for train.py's compiled_trainstep_file.

    Returns:
        The signature, in hexadecimal digits.

    Raises:
        UserError: JAX cannot serialize the program, or the file cannot be written.
    """
    run = _fingerprint(planned.growth, planned.model.config, planned.sharding, planned.state)
    try:
        return _save(path, run, planned.batch, compiled)
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"compiled_trainstep_file={path}: jax cannot serialize this program ({error}). Remove "
            "the key; restarts use the compilation cache (jax_cache_dir)."
        ) from error


def saved_steps(
    growth: ResolvedGrowth, model_config: ModelConfig, sharding: ShardingPlan, state: TrainState
) -> SavedSteps | None:
    """Returns the step of compiled_trainstep_file, or those of earlier runs.

    Args:
        growth: of the run, with its configuration.
        model_config: with `auto` resolved.
        sharding: of the run's devices.
        state: abstract TrainState with shardings.

    Raises:
        UserError: the file is missing, unsigned, or for another configuration, program or machine.
            None of it was executed.
    """
    path = growth.config.run.compiled_trainstep_file
    if path and frozen_models(model_config):
        raise UserError(
            f"compiled_trainstep_file={path}: steps of an objective with frozen models "
            f"(loss_type={model_config.objective.loss_type}) are not kept in files. Remove the "
            "key; restarts use the compilation cache (jax_cache_dir)."
        )
    identity = functools.partial(_fingerprint, growth, model_config, sharding, state)
    if not path:
        return _cached_steps(growth.config.run, identity, sharding, state)
    facts, executable = read_signed(path)
    run = identity()
    differences = _differences(facts["run"], run)
    if differences:
        lines = differences[:_MAX_LISTED_DIFFERENCES]
        num_hidden = len(differences) - len(lines)
        if num_hidden:
            lines.append(f"and {num_hidden} more")
        listed = "\n    ".join(lines)
        raise UserError(
            f"compiled_trainstep_file={path} was compiled for another run:\n    {listed}\n"
            "  What to do: compile again by train_compile.py with this configuration, or remove "
            "the key."
        )

    def load(batch: Batch) -> Callable | None:
        if _describe(batch) != facts["batch"]:
            return None
        try:
            return _load(facts, executable, sharding, state, batch)
        except Exception as error:  # runtimes raise anything
            kind = sharding.mesh.devices.flat[0].device_kind
            raise UserError(
                f"compiled_trainstep_file={path}: the runtime of these devices ({kind}) rejects "
                f"it: {str(error).splitlines()[0]}\n"
                "  What to do: compile it with the versions installed here, or remove the key."
            ) from error

    return SavedSteps(load, lambda batch, compiled, is_cache_hit: None, "file")


def _cached_steps(
    config: RunConfig,
    identity: Callable[[], dict[str, Any]],
    sharding: ShardingPlan,
    state: TrainState,
) -> SavedSteps | None:
    """Returns the steps of earlier CPU runs with the same code and options.

    Not with modules of the user, which may change anything.
    """
    folder = compilation_cache.folder_in_use()
    is_enabled = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009
    is_one_cpu = sharding.mesh.size == 1 and sharding.mesh.devices.flat[0].platform == "cpu"
    if not is_enabled or not folder or "://" in folder or not is_one_cpu:
        return None
    if config.import_modules or jax.process_count() > 1:
        return None

    @functools.cache
    def run() -> dict[str, Any]:
        names = ("flax", "numpy", "optax", "qwix")
        return identity() | {
            "packages": {name: importlib.metadata.version(name) for name in names},
            "options of jax": {name: repr(value) for name, value in jax.config.values.items()},
            "all sources": {"hash": _hash_of_sources(("**/*.py",))},
        }

    def path(batch: Batch) -> str:
        # A step of other sources replaces the file, so that the folder does not grow with edits.
        named = {group: facts for group, facts in run().items() if "sources" not in group}
        text = json.dumps([named, _describe(batch)])
        return f"{folder}/train_step-{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def load(batch: Batch) -> Callable | None:
        with contextlib.suppress(Exception):  # the step is compiled then
            stored_facts, executable = read_signed(path(batch))
            if stored_facts["run"] == run():
                return _load(stored_facts, executable, sharding, state, batch)
        return None

    def save(batch: Batch, compiled: jax.stages.Compiled, is_cache_hit: bool) -> None:
        with contextlib.suppress(Exception):
            file = path(batch)
            if not is_cache_hit:
                _save(file, run(), batch, compiled)
                return
            # XLA cannot serialize CPU programs of JAX's cache. The same program may be in the file.
            stored_facts, executable = read_signed(file)
            if stored_facts["program"] == _hash_of_program(compiled):
                write_signed(file, stored_facts | {"run": run()}, executable)

    return SavedSteps(load, save, "cache")


def _save(path: str, run: dict[str, Any], batch: Batch, compiled: jax.stages.Compiled) -> str:
    """Writes a step with what it was compiled for; returns the signature."""
    executable, _, out_tree = serialize_executable.serialize(compiled)
    _, metrics = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    facts = {
        "run": run,
        "batch": _describe(batch),
        "metrics": sorted(metrics),
        "program": _hash_of_program(compiled),
    }
    return write_signed(path, facts, executable)


def _hash_of_program(compiled: jax.stages.Compiled) -> str:
    """Returns a hash of the operations, without their places in the sources."""
    operations = [line for line in (compiled.as_text() or "").splitlines() if " = " in line]
    text = re.sub(r", metadata=\{[^}]*\}", "", "\n".join(operations))
    return hashlib.sha256(text.encode()).hexdigest()


def _load(
    facts: Mapping[str, Any],
    executable: bytes,
    sharding: ShardingPlan,
    state: TrainState,
    batch: Batch,
) -> Callable:
    devices = list(sharding.mesh.devices.flat)
    return serialize_executable.deserialize_and_load(
        executable,
        jax.tree.structure(((state, batch), {})),
        jax.tree.structure((state, dict.fromkeys(facts["metrics"], 0))),
        backend=devices[0].client,
        execution_devices=devices,
    )


def _fingerprint(
    growth: ResolvedGrowth, model_config: ModelConfig, sharding: ShardingPlan, state: TrainState
) -> dict[str, Any]:
    """Returns JSON values by group, equal for runs with the same step.

    `model_config` has `auto` resolved, which may differ without cuDNN.
    """
    device = sharding.mesh.devices.flat[0]
    values = flatten(growth.config.model_copy(update={"model": model_config}))
    slots = "none"
    if growth.existing_slots and growth.existing_slots_lr_scale != 1:
        slots = f"{growth.existing_slots} x {growth.existing_slots_lr_scale:g}"
    names = []
    for section, keys in keys_by_section().items():
        determines_step = bool(section) and section[0] in _SECTIONS
        names += [key.name for key in keys if determines_step or key.name in _KEYS]
    names.remove("sharding_tolerance")  # changes no program
    flags = {
        name: " ".join(sorted(re.sub(_OTHER_FLAGS, "", os.environ.get(name, "")).split()))
        for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    }
    return {
        "configuration": {name: to_yaml(values[name]) for name in names},
        "environment": flags,
        "versions": {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")},
        "sources of the step": {"hash": _hash_of_sources(_SOURCES)},
        "pre-existing slots": {"scaled": slots},
        "devices": {
            "kind": device.device_kind,
            "number": sharding.mesh.size,
            "mesh": str(dict(sharding.mesh.shape)),
            # CPU programs use the instructions of this processor.
            "processor": compilation_cache.cpu_fingerprint() if device.platform == "cpu" else "",
        },
        "state": _describe(state),
    }


def _describe(tree: PyTree) -> dict[str, str]:
    """Returns dtype, shape and sharding of each array by its path."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)} {leaf.sharding.spec}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Returns a line for each fact that differs between a file and this run."""
    lines = []
    for group, current_facts in current.items():
        stored_facts = stored.get(group, {})
        for name in sorted({*stored_facts, *current_facts}):
            in_file = stored_facts.get(name, "nothing")
            in_run = current_facts.get(name, "nothing")
            if in_file != in_run:
                lines.append(f"{group}, {name}: {in_file} in the file, {in_run} in this run")
    return lines


def _hash_of_sources(patterns: Iterable[str]) -> str:
    package = pathlib.Path(MaxText.__file__).parent
    digest = hashlib.sha256()
    for file in (file for pattern in patterns for file in sorted(package.glob(pattern))):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def write_signed(path: str, facts: Mapping[str, Any], executable: bytes) -> str:
    """Signs and atomically writes a file; returns the signature."""
    content = json.dumps(facts, sort_keys=True).encode() + b"\n" + executable
    signature = _signature(content, may_make_key=True)
    file = parse_path(path, "compiled_trainstep_file")
    try:
        if not is_object_store_path(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(file, _FIRST_LINE + signature.encode() + b"\n" + content)
    except OSError as error:
        raise UserError(f"compiled_trainstep_file={path}: cannot write it ({error})") from error
    return signature


def read_signed(path: str) -> tuple[dict[str, Any], bytes]:
    """Returns (facts, executable) of a verified file; else UserError."""
    try:
        file_bytes = parse_path(path, "compiled_trainstep_file").read_bytes()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error
        raise UserError(
            f"compiled_trainstep_file={path}: {reason}. Create it by train_compile.py with the "
            "same configuration and compile_topology, or remove the key."
        ) from error
    refused = f"compiled_trainstep_file={path} is rejected, and none of it was executed:"
    if not file_bytes.startswith(_FIRST_LINE):
        raise UserError(f"{refused} it is not a file of this version's train_compile.py.")
    signature, _, content = file_bytes.removeprefix(_FIRST_LINE).partition(b"\n")
    if not hmac.compare_digest(_signature(content).encode(), signature):
        raise UserError(
            f"{refused} invalid signature for key {_key_file()}: the file is corrupted, was "
            "modified, or was signed with another key.\n"
            "  What to do: compile it again, or copy the key of the machine that compiled it; "
            f"{KEY_VARIABLE} is the path of the key."
        )
    facts, _, executable = content.partition(b"\n")
    return json.loads(facts), executable


def _key_file() -> pathlib.Path:
    return pathlib.Path(os.environ.get(KEY_VARIABLE) or "~/.maxtext/signing_key").expanduser()


def _signature(content: bytes, may_make_key: bool = False) -> str:
    file = _key_file()
    try:
        if may_make_key and not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another process just made it
                file.touch(0o600, exist_ok=False)  # never readable by others
                file.write_text(secrets.token_hex(_KEY_BYTES) + "\n", encoding="utf-8")
        mode = file.stat().st_mode
        key = file.read_bytes().strip()
    except OSError as error:
        raise UserError(
            f"no key to sign or verify compiled_trainstep_file: {file} ({error}).\n"
            "  What to do: copy that file from the machine that compiled, with its permissions, or "
            f"set {KEY_VARIABLE} to its path; to compile, to a path that can be written."
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"other users can access the signing key {file}, and could sign anything with it. Run: "
            f"chmod 600 {file}"
        )
    if len(key) < _KEY_BYTES:
        raise UserError(f"the signing key {file} is shorter than {_KEY_BYTES} bytes")
    return hmac.new(key, _FIRST_LINE + content, hashlib.sha256).hexdigest()
