"""What a finished run leaves: nothing optional makes it fail."""

import types

import pytest
from etils import epath

from MaxText.config.model_sections import ObjectiveConfig
from MaxText.errors import TrainingDivergedError
from MaxText.inference import decoding
from MaxText.reports import report_writer
from MaxText.run.loop import Loop


@pytest.mark.parametrize("error", [ValueError("vocab_size is too small"), OSError("no space")])
def test_an_optional_output_that_fails_is_a_warning(error, monkeypatch, tmp_path):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(decoding, "write_sample", fails)
    monkeypatch.setattr(report_writer, "write_loss_curve", fails)
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
    batches = space(unigram_entropy_nats=None, tokenizer_folder="tokenizer")
    model_config = space(
        objective=ObjectiveConfig(), attention=space(causal=True), mixers=("attention",)
    )
    built, run = space(model=space(config=model_config)), epath.Path(tmp_path / "a run")
    checkpoints = space(latest_step=lambda: 12, directory=run / "checkpoints")
    loop = space(
        config=config, run_logger=records, batches=batches, state=space(params={}), sharding=None,
        eval_loss=2.5, checkpoints=checkpoints,
    )  # fmt: skip
    Loop.write_sample(loop, run, built.model)
    Loop.finish(loop, run, built)
    sample, curve, checkpoint, decode, report = lines
    for what, line in (("sample", sample), ("loss curve", curve)):
        assert all(word in line for word in ("WARNING", what, str(error)))
    assert checkpoint.endswith("checkpoints/12")
    assert f"decode load_parameters_path='{run}' import_modules=['my parts.py']" in decode
    assert f"report '{run}'" in report
    trend.diverged = "the loss ended at 9.1, above its first value 8.3"
    with pytest.raises(TrainingDivergedError, match=r"ended at 9\.1"):
        Loop.finish(loop, run, built)
    with pytest.raises(TrainingDivergedError, match="step 12 is broken"):
        Loop.finish(loop, run, built, "the state after step 12 is broken")
