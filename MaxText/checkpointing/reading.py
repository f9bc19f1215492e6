"""Restores arrays from a checkpoint and verifies their checksums."""

import contextlib
import dataclasses
import errno
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from MaxText.checkpointing import layout
from MaxText.checkpointing.checksums import array_checksums, first_difference, other_leaf
from MaxText.checkpointing.description import Description, Unreadable, describe
from MaxText.checkpointing.matching import (
    Cast,
    ConfigHint,
    check_matches,
    describe_casts,
    leaves_by_path,
    path_name,
)
from MaxText.checkpointing.unstacked_layers import is_unstacked, stack, unstack
from MaxText.config.catalog import unflatten
from MaxText.errors import UserError
from MaxText.storage.bucket_errors import BucketFailure, is_refusal, is_storage_error

_GUARD = "guard"
_CAST_BYTES = 1 << 30  # limit on bytes of arrays held in two dtypes at once during a cast
_LONGEST_REASON = 300  # characters
_WAITS = (1.0, 2.0, 4.0)  # seconds between retries


def as_dict(state: Any) -> dict[str, Any]:
    """Returns a train state (any dataclass) as a dict without None fields."""
    fields = ((field.name, getattr(state, field.name)) for field in dataclasses.fields(state))
    return {name: value for name, value in fields if value is not None}


def read_tree_description(stored: layout.Stored) -> dict[str, Any]:
    """Returns names, shapes and dtypes of all arrays; raises Unreadable or BucketFailure."""
    import orbax.checkpoint as ocp

    def read() -> dict[str, Any]:
        with damage_is_unreadable():
            return dict(ocp.PyTreeCheckpointHandler().metadata(stored.items).tree)

    return read_again(read)


def read_state(
    stored: layout.Stored,
    abstract_state: Any,
    config_flat: Mapping[str, Any],
    show: Callable[[str], None],
    *,
    is_own: bool = False,
) -> Any:
    """Restores a train state onto the shardings of `abstract_state`, else onto the first device.

    Uses `abstract_state.guard.fresh()` if the checkpoint has no `guard` or one of other shapes.
    Raises UserError if names or shapes differ, Unreadable if files are damaged.
    """
    wanted = as_dict(abstract_state)
    tree, described = _verified_description(stored)
    stored_guard = tree.pop(_GUARD, None)
    if _GUARD not in wanted:
        fresh: dict[str, Any] = {}
    elif leaves_by_path(stored_guard) == leaves_by_path(wanted[_GUARD]):
        tree[_GUARD], fresh = stored_guard, {}
    else:
        fresh = {_GUARD: wanted.pop(_GUARD).fresh()}
    hint = ConfigHint(described.metadata.get("config"), config_flat, is_own)
    arrays = _read(stored, tree, wanted, hint, described, show)
    return dataclasses.replace(abstract_state, **arrays, **fresh)


def read_params(
    stored: layout.Stored,
    abstract_params: Any,
    config_flat: Mapping[str, Any],
    show: Callable[[str], None],
) -> Any:
    """Restores the parameters only. Raises like `read_state`."""
    found, hint, described = _stored_params(stored, config_flat)
    wanted = {"params": abstract_params}
    return _read(stored, found, wanted, hint, described, show)["params"]


def check_params(
    stored: layout.Stored, abstract_params: Any, config_flat: Mapping[str, Any]
) -> None:
    """Raises `read_params`'s mismatch errors without reading arrays."""
    found, hint, _ = _stored_params(stored, config_flat)
    wanted = _as_stored(found, {"params": abstract_params}, config_flat)
    _check(stored, found, wanted, hint, lambda line: None)


def _stored_params(
    stored: layout.Stored, config_flat: Mapping[str, Any]
) -> tuple[dict[str, Any], ConfigHint, Description]:
    tree, described = _verified_description(stored)
    found = {"params": tree["params"]} if "params" in tree else {}
    return found, ConfigHint(described.metadata.get("config"), config_flat), described


def _as_stored(
    tree: dict[str, Any], wanted: dict[str, Any], config_flat: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the tree to request, which differs for older, unstacked layouts."""
    if is_unstacked(tree.get("params", {}), wanted["params"]):
        return unstack(wanted, unflatten(dict(config_flat)).model.layer_plan)
    return wanted


def _read(
    stored: layout.Stored,
    tree: dict[str, Any],
    wanted: dict[str, Any],
    hint: ConfigHint,
    described: Description,
    show: Callable[[str], None],
) -> dict[str, Any]:
    asked = _as_stored(tree, wanted, hint.current)
    casts = _check(stored, tree, asked, hint, show)
    arrays = _read_arrays(stored, asked, casts, described.checksums, show)
    if asked is wanted:
        return arrays
    return stack(arrays, wanted, unflatten(dict(hint.current)).model.layer_plan)


def _verified_description(stored: layout.Stored) -> tuple[dict[str, Any], Description]:
    tree, described = read_tree_description(stored), describe(stored)
    if described.checksums is not None and (
        difference := other_leaf(leaves_by_path(tree), described.checksums)
    ):
        raise Unreadable(f"{stored.items}: {difference}")
    return tree, described


def _check(stored, tree, wanted, hint: ConfigHint, show) -> list[Cast]:
    try:
        casts = check_matches(tree, wanted, hint)
    except UserError as error:
        raise UserError(f"{stored}: {error}") from None
    for line in describe_casts(casts):
        show(line)
    return casts


def _read_arrays(
    stored: layout.Stored,
    wanted: dict[str, Any],
    casts: list[Cast],
    checksums: dict[str, str] | None,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Reads arrays in stored dtypes, verifies and casts them, in groups that bound memory."""
    import orbax.checkpoint as ocp

    if checksums is None:
        show(f"  {stored} was saved without checksums: what was read is not verified")
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    paths, structure = jax.tree_util.tree_flatten_with_path(wanted)
    names = [path_name(path) for path, _ in paths]
    leaves = [leaf for _, leaf in paths]
    formats = {cast.path: cast.stored for cast in casts}
    arguments = [
        ocp.ArrayRestoreArgs(
            sharding=leaf.sharding or first,
            global_shape=leaf.shape,
            dtype=formats.get(name, leaf.dtype),
        )
        for name, leaf in zip(names, leaves, strict=True)
    ]
    arrays: list[Any] = [None] * len(leaves)
    for group in _groups(names, leaves, formats):
        items = [leaf if i in group else ocp.PLACEHOLDER for i, leaf in enumerate(leaves)]
        restored = jax.tree.leaves(
            _restore(stored, structure.unflatten(items), structure.unflatten(arguments))
        )
        read = {names[i]: restored[i] for i in sorted(group)}
        if checksums is not None and (
            difference := first_difference(array_checksums(read), checksums)
        ):
            raise Unreadable(difference)
        for i in sorted(group):
            arrays[i] = read[names[i]].astype(leaves[i].dtype)
        del restored, read
    return structure.unflatten(arrays)


def _groups(names: list[str], leaves: list[Any], formats: Mapping[str, np.dtype]) -> list[set[int]]:
    """Returns index groups: all uncast arrays, then casts of at most _CAST_BYTES each."""
    groups, room = [{i for i, name in enumerate(names) if name not in formats}], 0
    for i, name in enumerate(names):
        if name in formats:
            size = math.prod(leaves[i].shape) * formats[name].itemsize
            if size > room:
                groups.append(set())
                room = _CAST_BYTES
            groups[-1].add(i)
            room -= size
    return [group for group in groups if group]


def _restore(stored: layout.Stored, items: Any, arguments: Any) -> Any:
    import orbax.checkpoint as ocp

    wanted = ocp.args.PyTreeRestore(item=items, restore_args=arguments, partial_restore=True)

    def read() -> Any:
        with (
            damage_is_unreadable(),
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        ):
            # Restores are asynchronous; an error must surface here.
            return jax.block_until_ready(checkpointer.restore(stored.items, args=wanted))

    return read_again(read)


def read_again(read: Callable[[], Any]) -> Any:
    """Retries `read` after each of _WAITS while storage fails; a refusal is raised at once."""
    for seconds in _WAITS:
        try:
            return read()
        except BucketFailure as error:
            if error.errno != errno.EIO:
                raise
        time.sleep(seconds)
    return read()


@contextlib.contextmanager
def damage_is_unreadable() -> Iterator[None]:
    """Converts Orbax and TensorStore errors to Unreadable, or to BucketFailure if storage fails."""
    previous_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        late = inspect.iscoroutine(unraisable.object)
        if not late and str(unraisable.exc_value) != "Event loop is closed":
            previous_hook(unraisable)

    # When one array fails, Orbax closes its event loop and every array still in flight prints a
    # traceback, which would bury the message below.
    sys.unraisablehook = hook
    try:
        yield
    except (Unreadable, UserError):
        raise
    except (MemoryError, jax.errors.JaxRuntimeError, ImportError):
        raise  # says nothing about the files
    except Exception as error:  # Orbax raises plain Exception, and others from damaged JSON
        time.sleep(0.3)  # for arrays in flight
        if is_storage_error(error):
            raise BucketFailure(
                f"a checkpoint cannot be read now: {_innermost(error)}. Nothing was changed; the "
                "same command tries again.",
                may_pass=not is_refusal(error),
            ) from error
        raise Unreadable(_innermost(error)) from error
    finally:
        sys.unraisablehook = previous_hook


def _innermost(error: BaseException) -> str:
    """Returns the first line of the root cause; the rest is pages of TensorStore settings."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines()
    return lines[0][:_LONGEST_REASON] if lines else type(error).__name__
