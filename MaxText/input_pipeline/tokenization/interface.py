"""What every tokenizer offers, whatever file it comes from: `TextTokenizer`.

Imports no jax.
"""

import abc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from MaxText.errors import UserError
from MaxText.input_pipeline.cores import num_cores
from MaxText.input_pipeline.token_store.manifest import TokenizerEntry

# Control tokens by the names that published tokenizers use, tried in this order where no
# tokenizer_config.json says which they are.
KNOWN_CONTROL_TOKENS = {
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"),
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|endoftext|>"),
    "pad": ("<pad>", "<|pad|>", "<|padding|>", "[PAD]"),
    "mask": ("[MASK]", "<mask>"),
}

# Characters handed to a thread at a time. At 64 Ki the hand-over costs well below 1 % of the work,
# and a few megabytes of text still keep dozens of threads busy.
_CHARACTERS_PER_TASK = 1 << 16

# Characters of a sample that the two engines are compared on.
_COMPARED_CHARACTERS = 500_000


class TextTokenizer(abc.ABC):
    """Text to ids and back. Can be pickled: a worker process then need not prove anything again.

    Attributes:
      entry: what the manifest says about it.
      engine: the library that encodes, for reports.
      num_threads: threads that `encode` uses; may be set at any time.
    """

    def __init__(
        self, entry: TokenizerEntry, engine: str, mask_id: int | None = None, num_threads: int = 0
    ):
        """Takes what the attributes hold; `num_threads` 0 is one per core.

        `engine` is the library that defines the ids; one that gives the same ids may replace it.
        """
        self.entry = entry.model_copy(update={"mask_id": mask_id})
        self.engine = self._definition = engine
        self.num_threads = num_threads or num_cores()

    @property
    def mask_id(self) -> int | None:
        """Id that hides a token in masked language modelling, None where there is none."""
        return self.entry.mask_id

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens spelled as the library spells them.

        Bytes that are no UTF-8 become U+FFFD; ids that the tokenizer does not have are left out.
        """

    @abc.abstractmethod
    def save(self, folder: Path) -> list[Path]:
        """Writes the files that `load_tokenizer(str(folder))` makes this tokenizer from.

        Returns:
          The files written.
        """

    @abc.abstractmethod
    def _ids(self, text: str) -> np.ndarray:
        """Ids uint32 [N] of one text without lone surrogates, by the engine in use."""

    def _ids_by_definition(self, text: str) -> np.ndarray:
        """As `_ids`, by the library that defines what is right."""
        return self._ids(text)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids uint32 [N] of each text, without control ids; a control token in a text is text.

        Lone surrogates, which UTF-8 cannot hold, are encoded as U+FFFD. The arrays may be
        read-only.
        """
        groups = list(_groups(texts))
        num_threads = min(self.num_threads, len(groups))
        if num_threads <= 1:
            return self._encode_group(texts)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="encode") as threads:
            encoded = list(threads.map(self._encode_group, groups))
        return list(itertools.chain.from_iterable(encoded))

    def _encode_group(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._ids(without_surrogates(text)) for text in texts]

    def encode_by_definition(self, texts: Sequence[str]) -> list[np.ndarray]:
        """As `encode`, always by the library that defines the ids."""
        return [self._ids_by_definition(without_surrogates(text)) for text in texts]

    def use_definition(self) -> None:
        """Encodes by the library that defines the ids from now on."""
        self.engine = self._definition

    def check_engine(self, texts: Sequence[str]) -> bool:
        """Compares the engine with the definition on the first half million characters.

        After a difference `encode` is the definition.

        Returns:
          Whether every id was equal.
        """
        sample: list[str] = []
        left = _COMPARED_CHARACTERS
        for text in texts:
            if left <= 0:
                break
            sample.append(text[:left])
            left -= len(text)
        # In this thread: a regular expression is faster in the thread that used it first.
        pairs = zip(self._encode_group(sample), self.encode_by_definition(sample), strict=True)
        same = all(np.array_equal(fast, exact) for fast, exact in pairs)
        if not same:
            self.use_definition()
        return same

    def _refuse_forgery(self, spellings: Mapping[int, str], remedy: str) -> None:
        """Makes sure that no text gets a control id.

        Args:
          spellings: control id -> how its token is written.
          remedy: what the user can do, a sentence.

        Raises:
          UserError: a text that contains the spelling gets the id.
        """
        for control, token in spellings.items():
            contexts = [token, f"a {token} b", f"a{token}b", f"\n{token}\n", token * 2]
            if any(control in ids for ids in self.encode_by_definition(contexts)):
                raise UserError(
                    f"{self.entry.origin}: a document that contains {token!r} would get the "
                    f"control id {control}. {remedy}"
                )


def control_token_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """The `eos_token`, `bos_token`, `pad_token` and `mask_token` of a tokenizer_config.json.

    Each is written as text or as an object with the field `content`.
    """
    found: dict[str, str] = {}
    for name in KNOWN_CONTROL_TOKENS:
        token = settings.get(f"{name}_token")
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            found[f"{name}_token"] = token
    return found


def control_token_candidates(name: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Spellings of the control token `name`: the one in the settings, else the usual ones."""
    token = control_token_settings(settings).get(f"{name}_token")
    return KNOWN_CONTROL_TOKENS[name] if token is None else (token,)


def _groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Neighbouring texts in groups of about _CHARACTERS_PER_TASK."""
    start = size = 0
    for index, text in enumerate(texts, 1):
        size += len(text)
        if size >= _CHARACTERS_PER_TASK:
            yield texts[start:index]
            start, size = index, 0
    if start < len(texts):
        yield texts[start:]


def without_surrogates(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate (JSON can spell them, UTF-8 cannot)."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        # Through UTF-16, where two halves that belong together become one character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
