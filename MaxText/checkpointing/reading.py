"""Reading the arrays of one stored checkpoint: description, numbers and checksums."""

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

from MaxText.buckets.failures import BucketFailure, is_refusal, is_storage_error
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
from MaxText.configuration.catalogue import build
from MaxText.errors import UserError

_GUARD = "guard"
# Bytes of arrays that are there in two formats at once while they are cast.
_CAST_BYTES = 1 << 30
_LONGEST_REASON = 300  # characters
_WAITS = (1.0, 2.0, 4.0)  # seconds before storage that failed is asked again


def as_dict(state: Any) -> dict[str, Any]:
    """A train state (any dataclass) as the dict that is stored; without fields that are None."""
    fields = ((field.name, getattr(state, field.name)) for field in dataclasses.fields(state))
    return {name: value for name, value in fields if value is not None}


def read_tree_description(stored: layout.Stored) -> dict[str, Any]:
    """Names, shapes and formats of all arrays, without reading them.

    Raises:
      Unreadable: the description is damaged or missing.
      BucketFailure: storage fails, also when asked again.
    """
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
    """The whole train state, laid out as `abstract_state` asks, whatever devices wrote it.

    Where the checkpoint has no `guard`, or one of other shapes, that of the result is
    `abstract_state.guard.fresh()`.

    Args:
      abstract_state: a train state of jax.ShapeDtypeStruct; those without a sharding go to the
        first device.
      config_flat: current configuration, to explain a mismatch.
      is_own: whether it is a checkpoint of the run that goes on.

    Raises:
      UserError: names or shapes differ.
      Unreadable: files are damaged, or the numbers in them are not those that were saved.
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
    """Only the parameters; the optimizer's state is not read.

    Raises:
      UserError: names or shapes differ.
      Unreadable: files are damaged, or the numbers in them are not those that were saved.
    """
    found, hint, described = _stored_params(stored, config_flat)
    wanted = {"params": abstract_params}
    return _read(stored, found, wanted, hint, described, show)["params"]


def check_params(
    stored: layout.Stored, abstract_params: Any, config_flat: Mapping[str, Any]
) -> None:
    """Raises what `read_params` would raise for a mismatch, without reading arrays."""
    found, hint, _ = _stored_params(stored, config_flat)
    wanted = _as_stored(found, {"params": abstract_params}, config_flat)
    _check(stored, found, wanted, hint, lambda line: None)


def _stored_params(
    stored: layout.Stored, config_flat: Mapping[str, Any]
) -> tuple[dict[str, Any], ConfigHint, Description]:
    """What a checkpoint says of its parameters."""
    tree, described = _verified_description(stored)
    found = {"params": tree["params"]} if "params" in tree else {}
    return found, ConfigHint(described.metadata.get("config"), config_flat), described


def _as_stored(
    tree: dict[str, Any], wanted: dict[str, Any], config_flat: Mapping[str, Any]
) -> dict[str, Any]:
    """What to ask a checkpoint for, which may be of a version that stacked fewer layers."""
    if is_unstacked(tree.get("params", {}), wanted["params"]):
        return unstack(wanted, build(dict(config_flat)).model.layer_plan)
    return wanted


def _read(
    stored: layout.Stored,
    tree: dict[str, Any],
    wanted: dict[str, Any],
    hint: ConfigHint,
    described: Description,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Compares what is stored with what is wanted, and reads it."""
    asked = _as_stored(tree, wanted, hint.current)
    casts = _check(stored, tree, asked, hint, show)
    arrays = _read_arrays(stored, asked, casts, described.checksums, show)
    if asked is wanted:
        return arrays
    return stack(arrays, wanted, build(dict(hint.current)).model.layer_plan)


def _verified_description(stored: layout.Stored) -> tuple[dict[str, Any], Description]:
    """What the files say of the arrays, and what the checkpoint says of itself."""
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
    """Reads arrays in their stored formats, compares their checksums and casts them.

    Args:
      wanted: of jax.ShapeDtypeStruct.
      casts: those that change their format. They are read in groups, so that only some are there
        in both.
    """
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
    """Indices of the arrays to be read at once: those that stay as they are, then some by some."""
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
            # Reading goes on behind the returned arrays; an error must surface here.
            return jax.block_until_ready(checkpointer.restore(stored.items, args=wanted))

    return read_again(read)


def read_again(read: Callable[[], Any]) -> Any:
    """Calls `read`, again after each of _WAITS while storage fails.

    Raises:
      BucketFailure: storage fails for longer, or refuses.
    """
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
    """Turns what Orbax and TensorStore raise on damaged files into Unreadable.

    Storage that fails is a BucketFailure: nothing is known about the files then.
    """
    previous_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        late = inspect.iscoroutine(unraisable.object)
        if not late and str(unraisable.exc_value) != "Event loop is closed":
            previous_hook(unraisable)

    # When one array fails Orbax closes its event loop, and each array still on its way then
    # prints a traceback of its own: dozens of them would bury the message below.
    sys.unraisablehook = hook
    try:
        yield
    except (Unreadable, UserError):
        raise
    except (MemoryError, jax.errors.JaxRuntimeError, ImportError):
        raise  # says nothing about the files
    except Exception as error:  # Orbax raises that class itself, and others from damaged JSON
        time.sleep(0.3)  # for arrays on their way
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
    """The first line of what went wrong first; around it stand pages of settings."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).splitlines()
    return lines[0][:_LONGEST_REASON] if lines else type(error).__name__
