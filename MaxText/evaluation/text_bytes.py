"""How much text the targets of a data set spell. Imports no jax."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from MaxText.errors import UserError
from MaxText.evaluation.bytes_of_ids import IdBytes, NotExact, bytes_of_ids
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, read_manifest
from MaxText.input_pipeline.tokenization.interface import TextTokenizer
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer

if TYPE_CHECKING:
    from MaxText.input_pipeline.run_batches import OpenedSource

# Of the ids of two tokenizers, how many may be spelled differently where both are the same one in
# files of different kinds: a token of part of a character, or of a space, has no spelling alone.
_SAME_TOKENIZER = 0.1


class TextBytes:
    """The bytes of targets, by the tokenizer that made them, else as the preparation counted them.

    Where neither says it exactly, there is a reason instead: bytes per token of another text or
    tokenizer are no substitute.
    """

    def __init__(
        self,
        split: str,
        masked: bool,
        model_tokenizer: TextTokenizer | UserError,
    ):
        """
        Args:
          split: the split that is scored.
          masked: whether hidden tokens are predicted, which spell no text.
          model_tokenizer: of the weights, or why there is none.
        """
        self._split = split
        self._masked = masked
        self._model_tokenizer = model_tokenizer
        self._why: dict[str, str] = {}
        self._of_path = functools.cache(lambda path: load_tokenizer(path, num_threads=1))

    def of_ids(self, source: "OpenedSource | None") -> IdBytes | None:
        """Bytes of each id of a source; None where ids do not tell them."""
        try:
            if source is None:
                raise NotExact("random tokens are no text")
            if self._masked:
                raise NotExact("hidden tokens are predicted, which are no text")
            return bytes_of_ids(self._tokenizer(source))
        except (NotExact, UserError) as error:
            self._why[_name(source)] = str(error)
            return None

    def count(
        self,
        source: "OpenedSource | None",
        of_ids: IdBytes | None,
        spelled: int,
        num_targets: int,
        whole: bool,
    ) -> tuple[int | None, str]:
        """Bytes of the targets that were scored; else None and why.

        Args:
          of_ids: what of_ids gave.
          spelled: the sum of the targets' bytes by it.
          num_targets: that were scored.
          whole: whether the whole split was read.
        """
        if of_ids is not None:
            return spelled, ""
        why = self._why[_name(source)]
        if source is None or self._masked:
            return None, why
        folder = Path(source.entry.location).expanduser()
        if not (folder / MANIFEST_NAME).is_file():
            return None, why
        manifest = read_manifest(str(folder))
        split = manifest.splits[self._split]
        # Only what follows a bos includes the first token of each text.
        begins = bool(manifest.options.get("add_bos"))
        if begins and whole and num_targets >= split.num_tokens - split.num_documents:
            return split.num_text_bytes, ""
        return None, f"{why}; and not every token of the split is a target (add_bos, eval_steps)"

    def _tokenizer(self, source: "OpenedSource") -> TextTokenizer:
        """That made the ids of a source.

        Raises:
          NotExact: the one that is there is another one.
          UserError: there is none, or it cannot be read.
        """
        folder, sha256 = source.data.tokenizer_folder, source.data.tokenizer_sha256
        if folder is None:
            if isinstance(self._model_tokenizer, UserError):
                raise self._model_tokenizer
            return self._model_tokenizer
        tokenizer = self._of_path(str(folder))
        if sha256 and tokenizer.entry.sha256 != sha256:
            raise NotExact(f"the tokenizer in {folder} is not the one that made the ids")
        return tokenizer

    def mismatch(self, source: "OpenedSource") -> str:
        """A warning where ids of a source are those of another tokenizer than the model's."""
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
            f"warning: {different:,} of {size:,} ids of {source.entry.location} stand for other "
            f"text than in the tokenizer of the weights ({model.entry.origin}). Prepare the data "
            "with that tokenizer."
        )


def _name(source: "OpenedSource | None") -> str:
    return "" if source is None else source.entry.location
