"""Reading the arrays of one stored checkpoint: their description and their numbers."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from MaxText.checkpointing import layout
from MaxText.checkpointing.description import Unreadable, metadata_if_any
from MaxText.checkpointing.matching import ConfigHint, check_matches, describe_casts
from MaxText.errors import UserError


def as_dict(state: Any) -> dict[str, Any]:
    """A train state (any dataclass) as the dict that is stored."""
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def read_tree_description(stored: layout.Stored) -> dict[str, Any]:
    """Names, shapes and formats of all arrays, without reading them.

    Raises:
      Unreadable: the description is damaged or missing.
    """
    import orbax.checkpoint as ocp

    with _damage_is_unreadable(stored):
        return dict(ocp.PyTreeCheckpointHandler().metadata(stored.items).tree)


def read_state(
    stored: layout.Stored,
    abstract_state: Any,
    config_flat: Mapping[str, Any],
    show: Callable[[str], None],
    *,
    is_own: bool = False,
) -> Any:
    """The whole train state, laid out as `abstract_state` asks, whatever devices wrote it.

    Args:
      abstract_state: a train state of jax.ShapeDtypeStruct; those without a sharding go to the
        first device.
      config_flat: current configuration, to explain a mismatch.
      is_own: whether it is a checkpoint of the run that goes on.

    Raises:
      UserError: names or shapes differ.
      Unreadable: files are damaged.
    """
    wanted = as_dict(abstract_state)
    _check(stored, read_tree_description(stored), wanted, config_flat, show, is_own=is_own)
    return dataclasses.replace(abstract_state, **_read_arrays(stored, wanted))


def read_params(
    stored: layout.Stored,
    abstract_params: Any,
    config_flat: Mapping[str, Any],
    show: Callable[[str], None],
) -> Any:
    """Only the parameters; the optimizer's state is not read.

    Raises:
      UserError: names or shapes differ.
      Unreadable: files are damaged.
    """
    wanted = {"params": abstract_params}
    description = read_tree_description(stored)
    found = {"params": description["params"]} if "params" in description else {}
    _check(stored, found, wanted, config_flat, show)
    return _read_arrays(stored, wanted)["params"]


def check_params(
    stored: layout.Stored, abstract_params: Any, config_flat: Mapping[str, Any]
) -> None:
    """Raises what `read_params` would raise for a mismatch, without reading arrays."""
    description = read_tree_description(stored)
    found = {"params": description["params"]} if "params" in description else {}
    _check(stored, found, {"params": abstract_params}, config_flat, lambda line: None)


def _check(stored, description, wanted, config_flat, show, *, is_own=False) -> None:
    hint = ConfigHint(metadata_if_any(stored).get("config"), config_flat, is_own)
    try:
        casts = check_matches(description, wanted, hint)
    except UserError as error:
        raise UserError(f"{stored}: {error}") from None
    for line in describe_casts(casts):
        show(line)


def _read_arrays(stored: layout.Stored, wanted: dict[str, Any]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or first)

    wanted = jax.tree.map(placed, wanted)
    arguments = ocp.args.PyTreeRestore(
        item=wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,
    )
    with (
        _damage_is_unreadable(stored),
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        restored = checkpointer.restore(stored.items, args=arguments)
        # Reading goes on behind the returned arrays; an error must surface here.
        return jax.block_until_ready(restored)


@contextlib.contextmanager
def _damage_is_unreadable(stored: layout.Stored) -> Iterator[None]:
    """Turns what Orbax and TensorStore raise on damaged files into Unreadable."""
    previous_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous_hook(unraisable)

    # When one array fails Orbax closes its event loop, and each array still on its way then
    # prints a traceback of its own: dozens of them would bury the message below.
    sys.unraisablehook = hook
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # a lack of memory says nothing about the files
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        time.sleep(0.3)  # for arrays on their way
        raise Unreadable(str(error)) from error
    finally:
        sys.unraisablehook = previous_hook
