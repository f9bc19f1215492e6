"""The order in which GPT-NeoX visits Megatron data, computed from its seed.

Documents are laid end to end in random order, over all epochs at once, and cut into samples of
T + 1 tokens that share one token with their neighbours; the samples are visited in another random
order. Both come from one numpy RandomState, documents first.
"""

import numpy as np

from MaxText.errors import UserError


def document_range(split: str, part: int, num_documents: int) -> tuple[int, int]:
    """The documents of one part of a data set that is divided as `969,30,1`.

    Args:
      split: shares of training, validation and test, separated by commas or slashes.
      part: 0, 1 or 2 of these.
      num_documents: of the whole data set.

    Returns:
      First document and the one after the last.

    Raises:
      UserError: the shares are no numbers of 0 and above with a sum above 0.
    """
    try:
        shares = [float(share) for share in split.replace("/", ",").split(",")]
        shares = [*shares, 0.0, 0.0][:3]
        total = sum(shares)
        if total <= 0 or min(shares) < 0:
            raise ValueError
    except ValueError:
        raise UserError(
            f"{split!r} is no division of a data set. Give up to three shares such as 969,30,1."
        ) from None
    ends = np.cumsum([0, *(round(share / total * float(num_documents)) for share in shares)])
    # What rounding made too many or too few is taken from all ends alike, as GPT-NeoX does.
    ends[1:] -= ends[-1] - num_documents
    return int(ends[part]), int(ends[part + 1])


class GptNeoxOrder:
    """Sample i is the i-th sample of T + 1 tokens that GPT-NeoX trains on.

    Memory: 12 bytes per document and epoch, 4 per sample.
    """

    def __init__(
        self,
        document_offsets: np.ndarray,
        length: int,
        seed: int,
        num_samples: int | None = None,
        documents: tuple[int, int] | None = None,
    ):
        """Draws both orders.

        Args:
          document_offsets: int64 [D + 1], first token of each document, then the end.
          length: T, tokens of a sample that are predicted.
          seed: GPT-NeoX's.
          num_samples: samples of the whole run, its steps times its batch size: the documents of
            as many epochs as that takes are shuffled together, so the order depends on it. None
            for one epoch.
          documents: the part of the data set to visit, see document_range. None for all.

        Raises:
          UserError: the documents hold no sample.
        """
        first, stop = documents or (0, document_offsets.size - 1)
        sizes = np.diff(document_offsets[first : stop + 1])
        tokens = int(sizes.sum())
        if tokens < 2 or (num_samples is None and tokens <= length):
            raise UserError(
                f"megatron_order=gpt_neox: the documents have {tokens} tokens, too few for a "
                f"sample of {length + 1}. Choose a shorter max_target_length or more data."
            )
        epochs = 1 if num_samples is None else max(1, -(-(num_samples * length + 1) // tokens))
        random = np.random.RandomState(seed)
        order = np.tile(np.arange(first, stop, dtype=np.int32), epochs)
        random.shuffle(order)
        self._order = order
        self._ends = np.cumsum(sizes[order - first], dtype=np.int64)
        self._starts = document_offsets
        self._length = length
        total = (epochs * tokens - 1) // length
        self._samples = np.arange(total, dtype=np.int64 if total >= 2**32 - 2 else np.uint32)
        random.shuffle(self._samples)

    def __len__(self) -> int:
        """Samples of all epochs."""
        return self._samples.size

    def pieces(self, sample: int) -> list[tuple[int, int]]:
        """Where the T + 1 tokens of a sample lie in the token stream: pairs (start, stop).

        The pieces follow each other in the sample, one of each document it touches.
        """
        start = int(self._samples[sample]) * self._length
        stop = start + self._length + 1
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right").tolist()
        pieces = []
        for place in range(first, last + 1):
            end = int(self._ends[place])
            document = int(self._order[place])
            # Tokens of this document that lie before the sample, and after it.
            document_stop = int(self._starts[document + 1])
            document_start = int(self._starts[document])
            begun = end - (document_stop - document_start)
            low, high = max(start, begun), min(stop, end)
            if low < high:
                pieces.append((document_start + low - begun, document_start + high - begun))
        return pieces
