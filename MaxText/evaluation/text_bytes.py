"""Text bytes of dataset targets."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from MaxText.errors import UserError
from MaxText.evaluation.token_bytes import InexactByteCountError, TokenByteCounts, token_byte_counts
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, read_manifest
from MaxText.input_pipeline.tokenization.interface import TextTokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer

if TYPE_CHECKING:
    from MaxText.input_pipeline.data_sources import OpenDataSource

# Share of ids that may decode differently if the same tokenizer is stored in two formats: partial
# characters and spaces do not decode on their own.
_SAME_TOKENIZER = 0.1


class TextBytes:
    """Counts text bytes of targets by tokenizer, or else by manifest.

    Gives a reason if neither is exact: bytes per token of another text or tokenizer would be wrong.
    """

    def __init__(
        self,
        split: str,
        masked: bool,
        model_tokenizer: TextTokenizer | UserError,
    ):
        """Takes the tokenizer of the weights, or the error of opening it.

        With `masked`, targets are hidden tokens, which do not form a text.
        """
        self._split = split
        self._masked = masked
        self._model_tokenizer = model_tokenizer
        self._of_path = functools.cache(lambda path: load_tokenizer(path))

    def byte_counts(self, source: "OpenDataSource | None") -> tuple[TokenByteCounts | None, str]:
        """Returns bytes per id of a source, or None and the reason."""
        try:
            if source is None:
                raise InexactByteCountError("random tokens are not text")
            if self._masked:
                raise InexactByteCountError("hidden tokens are not text")
            return token_byte_counts(self._tokenizer(source)), ""
        except (InexactByteCountError, UserError) as error:
            return None, str(error)

    def from_manifest(
        self, source: "OpenDataSource | None", num_targets: int, is_whole_split: bool, why: str
    ) -> tuple[int | None, str]:
        """Returns the bytes of scored targets by the manifest, or None and why.

        `why` is the reason of byte_counts.
        """
        if source is None or self._masked:
            return None, why
        folder = Path(source.entry.location).expanduser()
        if not (folder / MANIFEST_NAME).is_file():
            return None, why
        manifest = read_manifest(str(folder))
        split = manifest.splits[self._split]
        # The first token of each text is a target only if a bos precedes it.
        begins = bool(manifest.options.get("add_bos"))
        if begins and is_whole_split and num_targets >= split.num_tokens - split.num_documents:
            return split.num_text_bytes, ""
        return None, f"{why}; and not every token of the split is a target (add_bos, eval_steps)"

    def _tokenizer(self, source: "OpenDataSource") -> TextTokenizer:
        """Returns the tokenizer of a source's ids; raises if there is none."""
        folder, sha256 = source.data.tokenizer_folder, source.data.tokenizer_sha256
        if folder is None:
            if isinstance(self._model_tokenizer, UserError):
                raise self._model_tokenizer
            return self._model_tokenizer
        tokenizer = self._of_path(str(folder))
        if sha256 and tokenizer.entry.sha256 != sha256:
            raise InexactByteCountError(f"the tokenizer in {folder} is not the one of the ids")
        return tokenizer

    def mismatch(self, source: "OpenDataSource") -> str:
        """Returns a warning if the source's tokenizer is not the model's."""
        folder, model = source.data.tokenizer_folder, self._model_tokenizer
        if folder is None or isinstance(model, UserError):
            return ""
        own = self._of_path(str(folder))
        if own.entry.sha256 == model.entry.sha256:
            return ""
        size = min(own.entry.vocab_size, model.entry.vocab_size)
        different = sum(own.decode([i]) != model.decode([i]) for i in range(size))
        if different <= _SAME_TOKENIZER * size:
            return ""
        return (
            f"warning: {different:,} of {size:,} ids of {source.entry.location} decode differently "
            f"with the tokenizer of the weights ({model.entry.origin}). Prepare the data with that "
            "tokenizer."
        )
