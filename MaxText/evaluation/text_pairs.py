"""Tokenization of context and continuation."""

from collections.abc import Callable, Sequence

from MaxText.errors import UserError
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.input_pipeline.tokenization.interface import CONFIG_NAME, read_json


def first_id(tokenizer: ModelTokenizer) -> int:
    """Returns the id before the first id of a text: bos, else eos.

    As in lm-evaluation-harness, a tokenizer whose settings set bos_token to null uses eos, whatever
    other tokens it has. Raises UserError if the tokenizer has neither.
    """
    # A hub id is not a local path, so local files do not belong to it.
    place = tokenizer.folder
    folder = place if place.is_dir() else place.parent
    settings = read_json(folder / CONFIG_NAME) if place.exists() else {}
    has_none = "bos_token" in settings and settings["bos_token"] is None
    entry = tokenizer.tokenizer.entry
    candidates = (
        None if has_none and not tokenizer.prefix else entry.bos_id,
        entry.eos_id,
        *tokenizer.ends,
    )
    for candidate in candidates:
        if candidate is not None:
            return candidate
    raise UserError(
        f"the tokenizer of {tokenizer.folder} has neither a beginning-of-text nor an end-of-text "
        "token, and the first word of a text needs one to follow. Name them in its "
        f"{CONFIG_NAME} as bos_token or eos_token."
    )


def encode_pair(
    encode: Callable[[str], Sequence[int]], context: str, continuation: str, first: int | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the ids of a context and of its continuation.

    As in lm-evaluation-harness, both are encoded as one text and split at the length of the encoded
    context. Trailing white space of the context moves to the continuation. `first` (first_id)
    precedes a continuation without context.
    """
    kept = context.rstrip()
    context, continuation = kept, context[len(kept) :] + continuation
    if not context:
        assert first is not None
        ids = encode(continuation)
        return ([first], ids) if ids[0] != first else (ids[:1], ids[1:])
    of_context = encode(context)
    return of_context, encode(context + continuation)[len(of_context) :]
