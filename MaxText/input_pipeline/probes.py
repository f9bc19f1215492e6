"""Probes: generated tasks that one ability solves (`dataset_type=probe`, `probe=NAME`).

| probe | the model has to |
|---|---|
| mqar | recall the values of keys that it saw once (Arora et al. 2024, arXiv 2312.04927) |
| copy | repeat letters after a separator (Jelassi et al. 2024, arXiv 2402.01032) |
| induction | find an earlier marker, and say what followed it (Olsson et al. 2022, 2209.11895) |
| parity, s3, a5, s5 | keep the product of a group's elements (Merrill et al. 2024, 2404.08819) |

Every record is a function of the seed, the split and its index. Records have labels: the id to
predict at each position, or none. docs/how-to/probe_a_mixer.md says what solves which, and how to
read a result.
"""

import functools
import itertools

import numpy as np

from MaxText.config.probe_section import NUM_LETTERS, ProbeKeys
from MaxText.input_pipeline.data_source import Document, RecordSource, register

NO_LABEL = -1
_QUERY_GAP_POWER = -0.99  # queries soon after the pairs are more frequent, as in Zoology


@register("data_source", "probe", keys=ProbeKeys)
class Probe(RecordSource):
    """Records of the task that the key `probe` names."""

    has_labels = True
    config: ProbeKeys

    def __len__(self) -> int:
        if self.context.for_training:
            return self.config.probe_num_records
        return self.config.probe_num_test_records

    def record(self, index: int) -> Document:
        """Returns a record; those of training and of evaluation are drawn independently."""
        context = self.context
        rng = np.random.default_rng([context.seed, int(context.for_training), index])
        size = self.config.size(for_training=context.for_training)
        if self.config.probe == "mqar":
            return mqar(rng, size, context.vocab_size, context.sequence_length)
        if self.config.probe == "copy":
            return copy(rng, size)
        if self.config.probe == "induction":
            return induction(rng, size, context.vocab_size)
        return group_products(rng, size, self.config.probe)


def mqar(rng: np.random.Generator, num_pairs: int, vocab_size: int, length: int) -> Document:
    """Returns a record of multi-query associative recall (Arora et al. 2024, appendix E).

    It begins with n pairs of a key and a value, k_1 v_1 ... k_n v_n. Then each key comes once more,
    at position 2 n + 2 g, where its label is its value. The g are distinct, and g has a probability
    in proportion to (g + 1)^-0.99. All other positions hold random ids.

    Args:
      rng: Random numbers.
      num_pairs: n.
      vocab_size: V. Keys are distinct ids in [1, V/2), values distinct ids in [V/2, V).
      length: Tokens of the record, at least 4 n.
    """
    half = vocab_size // 2
    keys = 1 + rng.choice(half - 1, num_pairs, replace=False)
    values = half + rng.choice(vocab_size - half, num_pairs, replace=False)
    tokens = rng.integers(vocab_size, size=length)
    tokens[0 : 2 * num_pairs : 2] = keys
    tokens[1 : 2 * num_pairs : 2] = values
    num_gaps = (length - 2 * num_pairs) // 2
    weights = np.arange(1, num_gaps + 1) ** _QUERY_GAP_POWER
    gaps = rng.choice(num_gaps, num_pairs, replace=False, p=weights / weights.sum())
    positions = 2 * num_pairs + 2 * gaps
    tokens[positions] = keys
    labels = np.full(length, NO_LABEL)
    labels[positions] = values
    return Document(tokens, labels=labels)


def copy(rng: np.random.Generator, max_letters: int) -> Document:
    """Returns letters, a separator, and the letters again, which are the labels.

    The number of letters is uniform in 1 to `max_letters`. After the separator each letter is to be
    predicted, and after the last one a second separator. Ids are 1 to 26 for letters and 27.

    Args:
      rng: Random numbers.
      max_letters: The most letters.
    """
    separator = NUM_LETTERS + 1
    letters = rng.integers(1, NUM_LETTERS + 1, rng.integers(1, max_letters + 1))
    tokens = np.concatenate([letters, [separator], letters])
    labels = np.full(len(tokens), NO_LABEL)
    labels[len(letters) :] = np.append(letters, separator)
    return Document(tokens, labels=labels)


def induction(rng: np.random.Generator, num_tokens: int, vocab_size: int) -> Document:
    """Returns random tokens with one marker, and the marker again, whose label is its successor.

    Args:
      rng: Random numbers.
      num_tokens: Tokens before the second marker, at least 2.
      vocab_size: Ids are 2 to vocab_size - 1, and 1 is the marker.
    """
    marker = 1
    tokens = rng.integers(2, vocab_size, num_tokens + 1)
    marker_position = rng.integers(num_tokens - 1)
    tokens[marker_position] = marker
    tokens[-1] = marker
    labels = np.full(len(tokens), NO_LABEL)
    labels[-1] = tokens[marker_position + 1]
    return Document(tokens, labels=labels)


def group_products(rng: np.random.Generator, num_elements: int, group: str) -> Document:
    """Returns random elements of a group, each with the product of all so far as its label.

    The id of an element, and of a product, is 1 + its row in `group_table`.

    Args:
      rng: Random numbers.
      num_elements: Tokens of the record.
      group: One of parity, s3, a5 and s5.
    """
    table = group_table(group)
    elements = rng.integers(len(table), size=num_elements)
    product = 0
    labels = np.empty(num_elements, np.int64)
    for position, element in enumerate(elements.tolist()):
        product = int(table[product, element])
        labels[position] = 1 + product
    return Document(1 + elements, labels=labels)


@functools.cache
def group_table(group: str) -> np.ndarray:
    """Returns the multiplication table of a group, int [G, G]; element 0 is the identity.

    Args:
      group: parity, the integers modulo 2; s3 or s5, all permutations of 3 or 5 things; a5, the
        even ones of 5.
    """
    permutations = _permutations({"parity": 2, "s3": 3, "a5": 5, "s5": 5}[group])
    if group == "a5":
        permutations = [p for p in permutations if _is_even(p)]
    number = {permutation: index for index, permutation in enumerate(permutations)}
    table = np.empty((len(permutations), len(permutations)), np.int64)
    for first in permutations:
        for second in permutations:
            # First the first one, then the second one.
            composed = tuple(second[image] for image in first)
            table[number[first], number[second]] = number[composed]
    return table


def _permutations(num_things: int) -> list[tuple[int, ...]]:
    """Returns all permutations, the identity first."""
    return list(itertools.permutations(range(num_things)))


def _is_even(permutation: tuple[int, ...]) -> bool:
    """Returns whether an even number of pairs are in the wrong order."""
    inversions = [later < earlier for earlier, later in itertools.combinations(permutation, 2)]
    return sum(inversions) % 2 == 0
