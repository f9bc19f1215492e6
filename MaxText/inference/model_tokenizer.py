"""Tokenizer of trained weights, with its begin and end ids."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from MaxText.config.schema import Config
from MaxText.conversion.hf_checkpoint import CONFIG, GENERATION_CONFIG
from MaxText.conversion.tokenizer_copy import RUN_FOLDER_NAME
from MaxText.errors import UserError
from MaxText.input_pipeline.local_cache import copy_folder
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, TOKENIZER_NAME, read_manifest
from MaxText.input_pipeline.tokenization.interface import (
    CONFIG_NAME,
    Tokenizer,
    read_json,
    read_text,
)
from MaxText.input_pipeline.tokenization.load_tokenizer import find_tokenizer_near, load_tokenizer
from MaxText.storage.file_access import is_url, path_type, split_list


@dataclasses.dataclass(frozen=True)
class ModelTokenizer:
    """Encodes and decodes text for a model."""

    tokenizer: Tokenizer
    prefix: tuple[int, ...]  # bos if the model was trained with it
    eos_ids: tuple[int, ...]
    folder: Path  # folder or file it was loaded from

    def num_sampled_ids(self, rows: int) -> int:
        """Returns the number of ids to sample from, without embedding padding."""
        return min(self.tokenizer.entry.vocab_size, rows)

    def encode(self, text: str) -> list[int]:
        """Returns prefix and ids; an empty text without a prefix is an eos id."""
        ids = [*self.prefix, *self.tokenizer.encode([text])[0].tolist()]
        return ids or list(self.eos_ids[:1])

    def decode(self, ids: Sequence[int]) -> str:
        control = {*self.prefix, *self.eos_ids}
        return self.tokenizer.decode([i for i in ids if i not in control])

    def prefix_token_id(self) -> int:
        """Returns the id before the first id of a scored text: bos, else eos.

        As in lm-evaluation-harness, settings with bos_token null mean eos.
        """
        # A hub id is not a local path, so local files do not belong to it.
        folder = self.folder if self.folder.is_dir() else self.folder.parent
        settings = read_json(folder / CONFIG_NAME) if self.folder.exists() else {}
        has_no_bos = "bos_token" in settings and settings["bos_token"] is None and not self.prefix
        entry = self.tokenizer.entry
        candidates = (None if has_no_bos else entry.bos_id, entry.eos_id, *self.eos_ids)
        for candidate in candidates:
            if candidate is not None:
                return candidate
        raise UserError(
            f"the tokenizer of {self.folder} has neither a bos nor an eos token, and one of them "
            "has to precede a text that is scored. Set bos_token or eos_token in its "
            f"{CONFIG_NAME}."
        )


def encode_pair(
    encode: Callable[[str], Sequence[int]], context: str, continuation: str, prefix_id: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the ids of a context and of its continuation.

    As in lm-evaluation-harness, both are encoded as one text, after trailing white space of the
    context moved to the continuation. `prefix_id` precedes a continuation without context.
    """
    stripped = context.rstrip()
    context, continuation = stripped, context[len(stripped) :] + continuation
    if not context:
        ids = encode(continuation)
        return ([prefix_id], ids) if ids[0] != prefix_id else (ids[:1], ids[1:])
    context_ids = encode(context)
    return context_ids, encode(context + continuation)[len(context_ids) :]


def open_tokenizer(
    config: Config, weights: str, metadata: Mapping[str, Any] | None = None, *, typed: bool = False
) -> ModelTokenizer:
    """Finds and loads the tokenizer of trained weights.

    Uses only tokenizer_path if the user set it (`typed`). Otherwise tries tokenizer_path if it
    exists, the tokenizer next to the weights, the one of the dataset, and tokenizer_path as a hub
    id, in this order. Raises UserError if there is none, or as load_model_tokenizer does.
    """
    asked = config.preparation.tokenizer_path
    folder = None if typed and asked else _find(config, weights)
    path = str(folder) if folder is not None else asked
    if path:
        return load_model_tokenizer(path, config, tuple(_eos_ids(Path(weights), metadata or {})))
    raise UserError(
        f"no tokenizer found in {weights} or in the data set "
        f"({config.data.dataset_path or 'dataset_path is not set'}). Set "
        "tokenizer_path=FOLDER_OR_FILE."
    )


def load_model_tokenizer(
    path: str, config: Config, eos_ids: tuple[int, ...] = ()
) -> ModelTokenizer:
    """Loads a tokenizer by folder, file or hub id; `eos_ids` default to its.

    Raises UserError if it cannot be read, or has more ids than the model.
    """
    tokenizer = load_tokenizer(path, config.preparation.tokenizer_type)
    where = Path(path).expanduser()
    folder = where if where.is_dir() else where.parent
    if (folder / MANIFEST_NAME).is_file():
        adds_bos = bool(read_manifest(str(folder)).options.get("add_bos"))
    else:
        adds_bos = read_json(folder / CONFIG_NAME).get("add_bos_token")
    # An explicit setting takes precedence over a tokenizer.json's post-processor.
    prefix = () if isinstance(adds_bos, bool) else _post_processor_prefix(folder)
    entry = tokenizer.entry
    rows = config.model.shape.vocab_size
    bos = entry.bos_id
    if bos is not None and not prefix and (adds_bos is True or config.preparation.add_bos):
        prefix = (bos,)
    # Training accepts models without embeddings for ids that the data lack.
    unused = {bos, entry.pad_id, entry.mask_id} - {entry.eos_id, *prefix}
    largest = next(i for i in range(entry.vocab_size - 1, -2, -1) if i not in unused)
    if largest >= rows:
        raise UserError(
            f"{path} has ids up to {largest}, but the model has vocab_size={rows}: it is the "
            "tokenizer of another model. Set tokenizer_path to the right one."
        )
    if bos is not None and bos >= rows:
        # The model was trained without bos: eos of the preceding text begins a text.
        tokenizer.entry = entry.model_copy(update={"bos_id": None})
    if not eos_ids and entry.eos_id is not None:
        eos_ids = (entry.eos_id,)
    return ModelTokenizer(tokenizer, prefix, eos_ids, where)


def _find(config: Config, weights: str) -> Path | None:
    asked = config.preparation.tokenizer_path
    data = config.data
    if asked and Path(asked).expanduser().exists():
        return Path(asked).expanduser()
    # weights is <run>/checkpoints/<step>; the tokenizer is in the run folder.
    if is_url(weights):
        run = weights.rstrip("/").rsplit("/", 2)[0]
        if found := copy_folder(f"{run}/{RUN_FOLDER_NAME}", data.local_cache_dir):
            return found
    step = Path(weights)
    for place in (step, step.parent.parent / RUN_FOLDER_NAME):
        if place.is_dir() and (found := find_tokenizer_near(str(place / CONFIG), str(place))):
            return found
    for location in (data.dataset_path, data.grain_train_files, data.grain_eval_files):
        first = next(iter(split_list(location, ";")), "").rstrip("/")
        if is_url(first) and path_type(f"{first}/{MANIFEST_NAME}"):
            return copy_folder(first, data.local_cache_dir)
        folder = Path(first).expanduser()
        if location and folder.exists():
            probe = str(folder / MANIFEST_NAME) if folder.is_dir() else str(folder)
            if found := find_tokenizer_near(probe, str(folder)):
                return found
    return None


def _post_processor_prefix(folder: Path) -> tuple[int, ...]:
    """Returns the ids prepended to every text by a tokenizer.json."""
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        return ()
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(read_text(path))
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    return tuple(whole[: whole.index(plain[0])]) if plain and plain[0] in whole else ()


def _eos_ids(weights: Path, metadata: Mapping[str, Any]) -> Iterator[int]:
    """Yields eos ids from Hugging Face files or from the import's metadata."""
    noted = metadata.get("hugging_face") or {}
    for name, key in ((GENERATION_CONFIG, "generation_config"), (CONFIG, "config")):
        value = noted.get(key)
        if value is None and (weights / name).is_file():
            value = read_json(weights / name)
        ids = (value or {}).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        found = [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]
        if found:
            yield from found
            return
