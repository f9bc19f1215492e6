"""A data source of one's own: sums, generated while training, whose digits are the tokens.

    python MaxText/train.py configs/quickstart.yml run_name=sums \
        dataset_type=arithmetic import_modules=[examples/arithmetic_source.py]

The loss counts the digits of the sum and the end of the text, as in Lee et al. 2023, "Teaching
Arithmetic to Small Transformers" (arXiv 2307.03381).
"""

import numpy as np

from MaxText.config.keys import Section, key
from MaxText.input_pipeline.data_source import Document, DocumentSource, register

SYMBOLS = "\n0123456789+="  # the id of a token is its place here; the first ends a document


class Keys(Section):
    """Arithmetic."""

    num_problems: int = key(100_000, "Sums in the training split, before they repeat.", ge=1)
    max_digits: int = key(3, "Digits of a summand, at most.", ge=1, le=9)


@register("data_source", "arithmetic", keys=Keys)
class Arithmetic(DocumentSource):
    """Sums such as 42+17=59, each a document."""

    has_loss_mask = True

    def __len__(self) -> int:
        return self.config.num_problems if self.context.for_training else 1000

    def document(self, index: int) -> Document:
        """Returns the ids of one sum; a function of the index, the split and the keys alone."""
        rng = np.random.default_rng([self.context.for_training, self.context.seed, index])
        a, b = rng.integers(10 ** rng.integers(1, self.config.max_digits + 1, 2))
        text = f"{a}+{b}={a + b}\n"
        tokens = np.array([SYMBOLS.index(symbol) for symbol in text])
        return Document(tokens, loss_mask=np.arange(len(text)) > text.index("="))
