"""Keys of the built-in data source `probe`."""

from typing import Literal

from MaxText.config.keys import Count, Natural, Section, key

ProbeName = Literal["mqar", "copy", "induction", "parity", "s3", "a5", "s5"]
GROUP_ORDERS = {"parity": 2, "s3": 6, "a5": 60, "s5": 120}
NUM_LETTERS = 26


class ProbeKeys(Section):
    """Probes: generated tasks that one ability solves."""

    probe: ProbeName = key("mqar")
    """Task: mqar (recall values of keys), copy, induction, or the state of a group: parity, s3, a5,
    s5."""
    probe_size: Count = key(8)
    """Size in training: pairs of mqar, most letters of copy, tokens before the query of induction,
    elements of a group."""
    probe_test_size: Natural = key(0)
    """Size in evaluation, such as a longer one; 0 is probe_size. Records of both fit
    max_target_length."""
    probe_num_records: Count = key(100_000, "Records of training, before they repeat.")
    probe_num_test_records: Count = key(3_000, "Records of evaluation.")

    def size(self, *, for_training: bool) -> int:
        """Returns the size of the records of training or of evaluation."""
        return self.probe_size if for_training else self.probe_test_size or self.probe_size

    @property
    def num_tokens(self) -> int:
        """Tokens that the longest record needs."""
        size = max(self.probe_size, self.probe_test_size)
        lengths = {"mqar": 4 * size, "copy": 2 * size + 1, "induction": size + 1}
        return lengths.get(self.probe, size)

    @property
    def num_ids(self) -> int:
        """Ids that the records need, with that of padding."""
        if self.probe in GROUP_ORDERS:
            return 1 + GROUP_ORDERS[self.probe]
        size = max(self.probe_size, self.probe_test_size)
        return {"mqar": 2 * size + 2, "copy": NUM_LETTERS + 2, "induction": 3}[self.probe]
