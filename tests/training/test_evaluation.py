"""Sums of an evaluation, and what a finished run leaves: nothing optional makes it fail."""

import types

import pytest
from etils import epath

from MaxText.configuration.model_sections import Objective
from MaxText.errors import Diverged
from MaxText.generation import sampling
from MaxText.monitoring import loss_curve
from MaxText.training.evaluation import evaluate
from MaxText.training.finish import leave_results


def test_every_target_of_a_split_counts_the_same():
    batches = [
        {"lm_loss": 6.0, "total_weights": 2.0, "correct": 1.0},
        {"lm_loss": 1.0, "total_weights": 8.0, "correct": 4.0},
        {"lm_loss": 0.0, "total_weights": 0.0, "correct": 0.0},
    ]
    report = evaluate(lambda params, batch: batch, None, batches, step=3)
    assert (report.step, report.num_batches, report.total_weights) == (3, 3, 10)
    assert (report.loss, report.masked_accuracy) == (0.7, 0.5)
    assert report.has_perplexity
    entmax = evaluate(
        lambda params, batch: batch, None, [{"entmax_loss": 6.0, "total_weights": 2.0}], step=3
    )
    assert (entmax.loss, entmax.masked_accuracy, entmax.has_perplexity) == (3, None, False)


@pytest.mark.parametrize("error", [ValueError("vocab_size is too small"), OSError("no space")])
def test_an_optional_output_that_fails_is_a_warning(error, monkeypatch, tmp_path):
    def fails(*_):
        raise error

    monkeypatch.setattr(sampling, "write_sample", fails)
    monkeypatch.setattr(loss_curve, "draw_loss_curve", fails)
    lines = []
    space = types.SimpleNamespace
    trend = space(diverged="")
    records = space(
        terminal=space(line=lines.append), events=space(flush=lambda: None), trend=trend
    )
    config = space(
        decoding=space(sample_tokens=8), monitoring=space(loss_curve=True),
        run=space(import_modules=["my parts.py"]),
    )  # fmt: skip
    batches = space(unigram_entropy=None, tokenizer_folder="tokenizer")
    section = space(objective=Objective(), attention=space(causal=True), mixers=("attention",))
    built, state = space(model=space(section=section)), space(params={})
    run = epath.Path(tmp_path / "a run")
    (run / "checkpoints/12/items").mkdir(parents=True)
    leave_results(run, config, records, batches, built, state, None, 2.5)
    sample, curve, checkpoint, decode, report = lines
    for what, line in (("sample", sample), ("loss curve", curve)):
        assert all(word in line for word in ("WARNING", what, str(error)))
    assert checkpoint.endswith("checkpoints/12")
    assert f"decode load_parameters_path='{run}' import_modules=['my parts.py']" in decode
    assert f"report '{run}'" in report
    trend.diverged = "the loss ended at 9.1, above its first value 8.3"
    with pytest.raises(Diverged, match=r"ended at 9\.1"):
        leave_results(run, config, records, batches, built, state, None, 2.5)
