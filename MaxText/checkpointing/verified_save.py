"""Orbax handlers that verify a checkpoint's files before it is committed.

Orbax awaits what a handler's `save` returns before it renames the folder to its final name. An
error there is a failed save: the folder keeps its temporary name, and no reader takes it for a
checkpoint. Without this check a save can be committed although it cannot be restored, since merging
the files of the processes succeeds without any.
"""

import asyncio
import collections
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint.experimental.v1 as ocp
import tensorstore as ts
from etils import epath

from MaxText.checkpointing.checkpoint_files import (
    BYTES_PER_GB,
    ITEMS,
    JSON_FILE,
    METADATA,
    POSITION,
    CheckpointCorruptedError,
)
from MaxText.config.training_sections import CheckpointStorageConfig
from MaxText.runtime import peers
from MaxText.storage.paths import is_object_store_path

_TREE_FILE = "_METADATA"  # names and shapes of all arrays
_OCDBT_FILE = "manifest.ocdbt"  # where the values of all arrays are
# File with shape and chunks of an array, and the prefix of its chunks' names, by Zarr version.
_ZARR_2 = (".zarray", "")
_ZARR_3 = ("zarr.json", "c")
# Waits before a file counts as missing: network folders show other machines' files late.
RETRY_SECONDS = (0.5, 1.0, 2.0)
_VERIFICATION_MILLISECONDS = 3_600_000


class _VerifiedHandler(ocp.handlers.CheckpointableHandler[Any, Any]):
    """Does what a handler of Orbax does, and verifies what it has written.

    The handlers for trees and JSON are final: they can be wrapped, not subclassed.
    """

    def __init__(
        self,
        handler: ocp.handlers.CheckpointableHandler[Any, Any],
        verify: Callable[[epath.Path], None],
    ):
        """Gets a function that raises CheckpointCorruptedError for an incomplete folder."""
        self._handler = handler
        self._verify = verify

    async def save(
        self, directory: ocp.path.PathAwaitingCreation, checkpointable: Any
    ) -> Awaitable[None]:
        """Begins to save; the result is awaited before the checkpoint is committed."""
        written = await self._handler.save(directory, checkpointable)
        return self._verify_written(directory, written)

    async def _verify_written(
        self, directory: ocp.path.PathAwaitingCreation, written: Awaitable[None]
    ) -> None:
        await written  # of all processes
        if jax.process_count() == 1:
            await asyncio.to_thread(self._verify, await directory.await_creation())
            return
        # Otherwise the others would wait in a barrier of Orbax that allows five minutes, which is
        # short for the files of hundreds of hosts.
        key = _verification_key(f"{directory.path.parent.name}/{directory.path.name}")
        if jax.process_index() == 0:
            await asyncio.to_thread(self._verify_for_all, await directory.await_creation(), key)
        else:
            await asyncio.to_thread(_wait_for_verification, key)

    def _verify_for_all(self, folder: epath.Path, key: str) -> None:
        """Verifies a folder, and tells the other processes the result."""
        problem = None
        try:
            self._verify(folder)
        except Exception as error:
            problem = str(error)
            raise
        finally:
            peers.connected_client().key_value_set(key, json.dumps(problem))

    async def load(
        self, directory: ocp.path.Path, abstract_checkpointable: Any = None
    ) -> Awaitable[Any]:
        """Loads as Orbax does, without verification."""
        return await self._handler.load(directory, abstract_checkpointable)

    async def metadata(self, directory: ocp.path.Path) -> Any:
        """Returns what Orbax does."""
        return await self._handler.metadata(directory)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Returns what Orbax does."""
        return self._handler.is_handleable(checkpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Returns what Orbax does."""
        return self._handler.is_abstract_handleable(abstract_checkpointable)


_num_verifications: collections.Counter[str] = collections.Counter()  # by folder


def _verification_key(folder: str) -> str:
    """Returns where process 0 tells the result; the same in all processes, new for each save."""
    _num_verifications[folder] += 1
    return f"maxtext/verified/{folder}/{_num_verifications[folder]}"


def _wait_for_verification(key: str) -> None:
    """Waits for process 0; CheckpointCorruptedError if it found the folder incomplete."""
    problem = json.loads(
        peers.connected_client().blocking_key_value_get(key, _VERIFICATION_MILLISECONDS)
    )
    if problem is not None:
        raise CheckpointCorruptedError(f"process 0: {problem}")


class VerifiedArraysHandler(_VerifiedHandler):
    """Saves a tree of arrays, and commits it only if every chunk of every array is on disk."""

    def __init__(self):
        """Takes its options from the active `ocp.Context`."""
        super().__init__(ocp.handlers.PyTreeHandler(), verify_arrays)


class VerifiedJsonHandler(_VerifiedHandler):
    """Saves a JSON object, and commits it only if it can be read back."""

    def __init__(self):
        """Writes the file that Orbax 0 does, under which our readers and others look for it."""
        super().__init__(ocp.handlers.JsonHandler(filename=JSON_FILE), verify_json)


def save_context(storage: CheckpointStorageConfig) -> ocp.Context:
    """Returns Orbax's options to save checkpoints, with the handlers above for their items."""
    context = ocp.Context()
    context.asynchronous.timeout_secs = storage.timeout
    saving = context.array.saving
    saving.use_ocdbt = storage.use_ocdbt
    saving.use_zarr3 = storage.use_zarr3
    saving.ocdbt_target_data_file_size = storage.target_data_file_size_bytes
    context.memory.write_concurrent_bytes = storage.concurrent_gb * BYTES_PER_GB
    if storage.device_host_concurrent_gb is not None:
        context.memory.transfer_concurrent_bytes = storage.device_host_concurrent_gb * BYTES_PER_GB
    registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(VerifiedArraysHandler, checkpointable_name=ITEMS)
    for item in (POSITION, METADATA):
        registry.add(VerifiedJsonHandler, checkpointable_name=item)
    context.checkpointables.registry = registry
    return context


def verify_json(directory: epath.Path) -> None:
    """Checks that a saved JSON object can be read back; CheckpointCorruptedError if not."""
    path = directory / JSON_FILE
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointCorruptedError(f"{path} was not written completely: {error}") from error


def verify_arrays(directory: epath.Path) -> None:
    """Checks that every array of a saved tree is complete, without reading its values.

    Raises CheckpointCorruptedError with the first missing or truncated file or array.
    """
    for seconds in RETRY_SECONDS:
        if not _first_problem(directory):
            return
        time.sleep(seconds)
    if problem := _first_problem(directory):
        raise CheckpointCorruptedError(f"{problem}: the checkpoint could not be restored")


def _first_problem(directory: epath.Path) -> str:
    """Describes the first missing or truncated piece; empty if there is none."""
    tree_path = directory / _TREE_FILE
    try:
        tree = json.loads(tree_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{tree_path} is missing"
    except ValueError as error:
        return f"{tree_path} was not written completely ({error})"
    base = ts.KvStore.open(_kvstore_spec(directory)).result()
    store = base
    if tree["use_ocdbt"]:
        if not (directory / _OCDBT_FILE).exists():
            return f"{directory / _OCDBT_FILE} is missing"
        store = ts.KvStore.open({"driver": "ocdbt", "base": _kvstore_spec(directory)}).result()
        if problem := _first_file_problem(directory, base):
            return problem
    return _first_array_problem(tree, store)


def _kvstore_spec(directory: epath.Path) -> dict[str, str]:
    """Returns TensorStore's specification of a folder."""
    path = f"{directory}/"
    if not is_object_store_path(path):
        return {"driver": "file", "path": path}
    bucket, _, prefix = path.partition("://")[2].partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": prefix}


def _first_array_problem(tree: dict[str, Any], store: ts.KvStore) -> str:
    """Describes the first array that lacks its metadata or a chunk."""
    keys = {key.decode() for key in store.list().result()}
    description, chunk_prefix = _ZARR_3 if tree["use_zarr3"] else _ZARR_2
    names = sorted(
        ".".join(part["key"] for part in entry["key_metadata"])
        for entry in tree["tree_metadata"].values()
        if not entry["value_metadata"].get("skip_deserialize")
    )
    reads = {name: store.read(f"{name}/{description}") for name in names}
    num_keys: dict[str, int] = dict.fromkeys(names, 0)
    for key in keys:
        # A chunk is named name/0.1 or name/c/0/1.
        name, _, chunk = key.partition("/")
        if chunk and chunk != description and name in num_keys:
            num_keys[name] += chunk.startswith(chunk_prefix)
    for name, read in reads.items():
        result = read.result()
        if result.state != "value":
            return f"the array {name} is missing"
        num_chunks = _num_chunks(json.loads(result.value))
        if num_keys[name] != num_chunks:
            return f"the array {name} has {num_keys[name]} of {num_chunks} chunks"
    return ""


def _num_chunks(description: dict[str, Any]) -> int:
    """Returns the number of stored chunks of an array, from its Zarr metadata."""
    chunk_shape = description.get("chunks")
    if chunk_shape is None:
        chunk_shape = description["chunk_grid"]["configuration"]["chunk_shape"]
    return math.prod(
        -(-size // chunk) if chunk else 0
        for size, chunk in zip(description["shape"], chunk_shape, strict=True)
    )


def _first_file_problem(directory: epath.Path, base: ts.KvStore) -> str:
    """Describes the first data file that is shorter than the values it should hold."""
    file_sizes: dict[str, int] = {}
    for location in _value_locations(base):
        # "value:ocdbt.process_0/:d/<hash>:<offset>:<length>"
        _, folder, name, offset, length = location.split(":")
        file = f"{folder}{name}"
        file_sizes[file] = max(file_sizes.get(file, 0), int(offset) + int(length))
    for file, size in file_sizes.items():
        path = directory / file
        try:
            stored_size = path.stat().length
        except FileNotFoundError:
            return f"{path} is missing"
        if stored_size < size:
            return f"{path} has {stored_size:,} of {size:,} bytes"
    return ""


def _value_locations(base: ts.KvStore) -> Iterator[str]:
    """Yields the locations of all values of an OCDBT database that are in data files."""
    manifest = ts.ocdbt.dump(base).result()
    nodes = [version["root"].get("location") for version in manifest["versions"][-1:]]
    while nodes:
        location = nodes.pop()
        if location is None:
            continue  # an empty database
        yield location
        for entry in ts.ocdbt.dump(base, location).result()["entries"]:
            if "indirect_value" in entry:
                yield entry["indirect_value"]
            elif "location" in entry:
                nodes.append(entry["location"])
