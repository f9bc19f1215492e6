"""Removes random encoding from tokenizer files: BPE dropout, and sampling of segmentations.

A tokenizer that is trained with such regularization may be saved with it. Encoding must not depend
on chance: the same text has the same ids in every preparation, prompt and evaluation.
"""

import json
from typing import Any

from MaxText.value_types import JsonValue

# Tables of tokens, whose names are no settings.
_TABLES = {"vocab", "merges", "special_tokens", "added_tokens", "added_tokens_decoder"}
_DROPOUT = "dropout"
_UNIGRAM_SAMPLING = ("alpha", "nbest_size")
# Of SentencePiece, as transformers passes them on from tokenizer_config.json.
_SAMPLING_OPTIONS = {"enable_sampling", "nbest_size", "alpha"}
_SENTENCE_PIECE_OPTIONS = "sp_model_kwargs"


def without_dropout(contents: JsonValue) -> JsonValue:
    """Returns the contents of a tokenizer.json without BPE dropout; the same object without any."""
    if isinstance(contents, list):
        items = [without_dropout(item) for item in contents]
        is_same = all(item is original for item, original in zip(items, contents, strict=True))
        return contents if is_same else items
    if not isinstance(contents, dict):
        return contents
    changes = {}
    for name, value in contents.items():
        if name not in _TABLES:
            deterministic_value = without_dropout(value)
            if deterministic_value is not value:
                changes[name] = deterministic_value
    if isinstance(contents.get(_DROPOUT), int | float) and contents[_DROPOUT]:
        changes[_DROPOUT] = None
    if contents.get("type") == "Unigram":
        # Arguments of the class; no release so far reads them from a file.
        random_options = [name for name in _UNIGRAM_SAMPLING if contents.get(name) is not None]
        changes |= dict.fromkeys(random_options)
    return {**contents, **changes} if changes else contents


def without_sampling(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a tokenizer_config.json without options for SentencePiece to sample."""
    options = settings.get(_SENTENCE_PIECE_OPTIONS)
    if not isinstance(options, dict) or not _SAMPLING_OPTIONS & options.keys():
        return settings
    deterministic_options = {
        name: value for name, value in options.items() if name not in _SAMPLING_OPTIONS
    }
    return {**settings, _SENTENCE_PIECE_OPTIONS: deterministic_options}


def deterministic_file(name: str, content: bytes) -> bytes:
    """Returns a file of a tokenizer without what makes it random; unchanged if nothing does.

    `name` is the file's name, which tells whether it is JSON.
    """
    if not name.endswith(".json"):
        return content
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError):
        return content  # whoever reads it reports the damage
    if not isinstance(settings, dict):
        return content
    is_tokenizer = isinstance(settings.get("model"), dict)
    changed = without_dropout(settings) if is_tokenizer else without_sampling(settings)
    return content if changed is settings else to_text(changed).encode()


def to_text(contents: JsonValue) -> str:
    """Returns the text of a tokenizer.json, formatted as by the tokenizers library."""
    return json.dumps(contents, ensure_ascii=False, indent=2)
