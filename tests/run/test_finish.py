"""What a finished run leaves: nothing optional makes it fail."""

import types

import pytest
from etils import epath

from MaxText.config.model_sections import ObjectiveConfig
from MaxText.errors import TrainingDivergedError
from MaxText.inference import decoding
from MaxText.reports import report_writer
from MaxText.run import final_outputs

space = types.SimpleNamespace


@pytest.mark.parametrize("error", [ValueError("vocab_size is too small"), OSError("no space")])
def test_an_optional_output_that_fails_is_a_warning(error, monkeypatch, tmp_path):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(decoding, "write_sample", fails)
    monkeypatch.setattr(report_writer, "write_loss_curve", fails)
    lines = []
    run_logger = space(
        terminal=space(line=lines.append), events=space(flush=lambda: None), stats=None
    )
    config = space(decoding=space(sample_tokens=8), monitoring=space(loss_curve=True))
    final_outputs.write_sample(
        None,
        {},
        config=config,
        sharding=None,
        tokenizer=tmp_path,
        run_folder=tmp_path,
        run_logger=run_logger,
    )
    final_outputs.write_loss_curve(config, tmp_path, run_logger)
    for name, line in zip(("sample", "loss curve"), lines, strict=True):
        assert line == f"WARNING: cannot write the {name}: {error}"


def test_the_next_commands(tmp_path):
    lines = []
    model = space(
        config=space(
            objective=ObjectiveConfig(), attention=space(causal=True), mixers=("attention",)
        )
    )
    run_folder = epath.Path(tmp_path / "a run")

    def log_commands(**changes):
        lines.clear()
        arguments = {
            "config": space(run=space(import_modules=["my parts.py"])),
            "run_folder": run_folder,
            "checkpoint": run_folder / "checkpoints" / "12",
            "has_tokenizer": True,
            "log": lines.append,
        }
        final_outputs.log_next_commands(model, **(arguments | changes))
        return lines

    checkpoint, decode, report = log_commands()
    assert checkpoint.endswith("checkpoints/12")
    assert f"decode load_parameters_path='{run_folder}' import_modules=['my parts.py']" in decode
    assert f"report '{run_folder}'" in report
    assert len(log_commands(has_tokenizer=False)) == 2
    assert len(log_commands(checkpoint=None)) == 1
    model.config.attention.causal = False
    assert len(log_commands()) == 2


def test_the_validation_loss_is_shown_next_to_the_unigram_entropy():
    lines = []
    final_outputs.log_validation_loss(2.5, 4.25, lines.append)
    final_outputs.log_validation_loss(None, 4.25, lines.append)
    final_outputs.log_validation_loss(2.5, None, lines.append)
    assert lines == ["Validation loss 2.500, unigram entropy 4.250 nats"]


def test_a_diverged_run_ends_with_an_error():
    final_outputs.raise_if_diverged("", "")
    with pytest.raises(TrainingDivergedError, match=r"ended at 9\.1.* the run diverged"):
        final_outputs.raise_if_diverged("", "the loss ended at 9.1, above its first value 8.3")
    with pytest.raises(TrainingDivergedError, match=r"step 12 is broken\. Lower"):
        final_outputs.raise_if_diverged("the state after step 12 is broken", "the loss rose")
