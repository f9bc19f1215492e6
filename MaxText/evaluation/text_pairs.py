"""Texts and pairs of texts as continuations of ids. Imports no jax."""

from collections.abc import Callable, Sequence

from MaxText.errors import UserError
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.input_pipeline.tokenization.tokenizer_files import CONFIG_NAME, read_json


def first_id(tokenizer: ModelTokenizer) -> int:
    """The id that the first id of a text follows: beginning of text, else end of text.

    As lm-evaluation-harness chooses it for the same tokenizer: one whose settings say that it has
    no beginning-of-text token takes the end, whatever other tokens it has.

    Raises:
      UserError: the tokenizer has neither.
    """
    # The name of a tokenizer that is no file says nothing of the files here.
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
    """Ids of a context and of what follows it.

    Both are encoded as one text, and the ids past those of the context alone are the
    continuation's, as lm-evaluation-harness does it: white space at the end of the context goes to
    the continuation, where words begin with theirs.

    Args:
      encode: text to ids, with what the model's texts begin with.
      first: what a continuation without context follows (first_id); None where each has one.
    """
    kept = context.rstrip()
    context, continuation = kept, context[len(kept) :] + continuation
    if not context:
        assert first is not None
        ids = encode(continuation)
        return ([first], ids) if ids[0] != first else (ids[:1], ids[1:])
    of_context = encode(context)
    return of_context, encode(context + continuation)[len(of_context) :]
