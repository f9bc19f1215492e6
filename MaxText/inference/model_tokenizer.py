"""Tokenizer of trained weights, with its begin and end ids.

Weights and tokenizer are stored apart: a run keeps a copy of its tokenizer, Hugging Face weights
have it in their folder, and a checkpoint moved elsewhere may have none. `open_tokenizer` searches
for it, and `load_model_tokenizer` checks that it fits the model.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from MaxText.config.data_sections import DataConfig
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

    def num_sampled_ids(self, num_embeddings: int) -> int:
        """Returns the number of ids to sample from, without embedding padding."""
        return min(self.tokenizer.entry.vocab_size, num_embeddings)

    def encode(self, text: str) -> list[int]:
        """Returns prefix and ids; an empty text without a prefix is an eos id."""
        ids = [*self.prefix, *self.tokenizer.encode([text])[0].tolist()]
        return ids or list(self.eos_ids[:1])

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without bos and eos."""
        control = {*self.prefix, *self.eos_ids}
        return self.tokenizer.decode([i for i in ids if i not in control])

    def prefix_token_id(self) -> int:
        """Returns the id before the first id of a scored text: bos, else eos.

        As in lm-evaluation-harness, settings with bos_token null mean eos. Raises UserError if
        there is neither.
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
    stripped_context = context.rstrip()
    continuation = context[len(stripped_context) :] + continuation
    if not stripped_context:
        ids = encode(continuation)
        if ids[0] == prefix_id:
            return ids[:1], ids[1:]
        return [prefix_id], ids
    context_ids = encode(stripped_context)
    return context_ids, encode(stripped_context + continuation)[len(context_ids) :]


def open_tokenizer(
    config: Config, weights: str, metadata: Mapping[str, Any] | None = None, *, typed: bool = False
) -> ModelTokenizer:
    """Finds and loads the tokenizer of trained weights.

    Tries, in this order: tokenizer_path if it exists, the tokenizer next to the weights, the one of
    the dataset, and tokenizer_path as a hub id.

    Args:
      config: The configuration with which the weights are used.
      weights: Checkpoint step folder, or Hugging Face checkpoint.
      metadata: Metadata of the checkpoint. An import from Hugging Face has its eos ids there.
      typed: Whether the user set tokenizer_path: then nothing else is tried.

    Raises:
      UserError: There is no tokenizer, or load_model_tokenizer refuses it.
    """
    tokenizer_path = config.preparation.tokenizer_path
    folder = None if typed and tokenizer_path else _find_tokenizer(config, weights)
    path = str(folder) if folder is not None else tokenizer_path
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
    """Loads a tokenizer and checks that it fits the model.

    Args:
      path: Folder, file or hub id.
      config: The model's configuration.
      eos_ids: Ids that end a text; by default the eos id of the tokenizer.

    Raises:
      UserError: It cannot be read, or has more ids than the model.
    """
    tokenizer = load_tokenizer(path, config.preparation.tokenizer_type)
    location = Path(path).expanduser()
    folder = location if location.is_dir() else location.parent
    if (folder / MANIFEST_NAME).is_file():
        adds_bos = bool(read_manifest(str(folder)).options.get("add_bos"))
    else:
        adds_bos = read_json(folder / CONFIG_NAME).get("add_bos_token")
    # An explicit setting takes precedence over a tokenizer.json's post-processor.
    prefix = () if isinstance(adds_bos, bool) else _post_processor_prefix(folder)
    entry = tokenizer.entry
    num_embeddings = config.model.shape.vocab_size
    bos = entry.bos_id
    if bos is not None and not prefix and (adds_bos is True or config.preparation.add_bos):
        prefix = (bos,)
    # Training accepts models without embeddings for ids that the data lack.
    unused = {bos, entry.pad_id, entry.mask_id} - {entry.eos_id, *prefix}
    largest_id = next(i for i in range(entry.vocab_size - 1, -2, -1) if i not in unused)
    if largest_id >= num_embeddings:
        raise UserError(
            f"{path} has ids up to {largest_id}, but the model has vocab_size={num_embeddings}: "
            "it is the tokenizer of another model. Set tokenizer_path to the right one."
        )
    if bos is not None and bos >= num_embeddings:
        # The model was trained without bos: eos of the preceding text begins a text.
        tokenizer.entry = entry.model_copy(update={"bos_id": None})
    if not eos_ids and entry.eos_id is not None:
        eos_ids = (entry.eos_id,)
    return ModelTokenizer(tokenizer, prefix, eos_ids, location)


def _find_tokenizer(config: Config, weights: str) -> Path | None:
    """Returns the local folder or file of the tokenizer, as open_tokenizer searches for it."""
    tokenizer_path = config.preparation.tokenizer_path
    if tokenizer_path and Path(tokenizer_path).expanduser().exists():
        return Path(tokenizer_path).expanduser()
    return _tokenizer_of_weights(weights, config.data.local_cache_dir) or _tokenizer_of_data(
        config.data
    )


def _tokenizer_of_weights(weights: str, cache_dir: Path) -> Path | None:
    """Returns the tokenizer in the folder of the weights or of their run; copies a remote one.

    `weights` is <run>/checkpoints/<step>, or a Hugging Face folder.
    """
    if is_url(weights):
        run_folder = weights.rstrip("/").rsplit("/", 2)[0]
        if copied := copy_folder(f"{run_folder}/{RUN_FOLDER_NAME}", cache_dir):
            return copied
    step_folder = Path(weights)
    for folder in (step_folder, step_folder.parent.parent / RUN_FOLDER_NAME):
        if folder.is_dir():
            tokenizer = find_tokenizer_near(str(folder / CONFIG), str(folder))
            if tokenizer:
                return tokenizer
    return None


def _tokenizer_of_data(data: DataConfig) -> Path | None:
    """Returns the tokenizer next to the first dataset that has one; copies a remote one."""
    for locations in (data.dataset_path, data.grain_train_files, data.grain_eval_files):
        location = next(iter(split_list(locations, ";")), "").rstrip("/")
        if is_url(location) and path_type(f"{location}/{MANIFEST_NAME}"):
            return copy_folder(location, data.local_cache_dir)
        path = Path(location).expanduser()
        if locations and path.exists():
            file = path / MANIFEST_NAME if path.is_dir() else path
            tokenizer = find_tokenizer_near(str(file), str(path))
            if tokenizer:
                return tokenizer
    return None


def _post_processor_prefix(folder: Path) -> tuple[int, ...]:
    """Returns the ids prepended to every text by a tokenizer.json."""
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        return ()
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(read_text(path))
    plain_ids = tokenizer.encode("a", add_special_tokens=False).ids
    ids = tokenizer.encode("a").ids
    if not plain_ids or plain_ids[0] not in ids:
        return ()
    return tuple(ids[: ids.index(plain_ids[0])])


def _eos_ids(weights: Path, metadata: Mapping[str, Any]) -> Iterator[int]:
    """Yields eos ids from Hugging Face files or from the import's metadata.

    As in transformers, generation_config.json takes precedence over config.json.
    """
    imported = metadata.get("hugging_face") or {}
    for name, key in ((GENERATION_CONFIG, "generation_config"), (CONFIG, "config")):
        settings = imported.get(key)
        if settings is None and (weights / name).is_file():
            settings = read_json(weights / name)
        ids = (settings or {}).get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        valid_ids = [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]
        if valid_ids:
            yield from valid_ids
            return
