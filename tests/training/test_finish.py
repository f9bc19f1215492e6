"""What a finished run leaves: nothing optional makes a failure of it."""

import types

import jax
import pytest

from MaxText.generation import sampling
from MaxText.monitoring import loss_curve
from MaxText.training.finish import leave_results


@pytest.mark.parametrize("error", [ValueError("vocab_size is too small"), OSError("no space")])
def test_an_optional_output_that_fails_is_a_warning(error, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr(sampling, "write_sample", fails)
    monkeypatch.setattr(loss_curve, "draw_loss_curve", fails)
    lines = []
    space = types.SimpleNamespace
    records = space(terminal=space(line=lines.append), events=space(flush=lambda: None))
    config = space(decoding=space(sample_tokens=8), monitoring=space(loss_curve=True))
    batches = space(unigram_entropy=None, tokenizer_folder="tokenizer")
    model = space(section=space(objective=space(is_in_nats=True)))
    leave_results("run", config, records, batches, model, {}, None, 2.5)
    assert jax.process_index() == 0
    assert lines == [
        f"!!! WARNING: the {what} could not be made: {error}" for what in ("sample", "loss curve")
    ]
