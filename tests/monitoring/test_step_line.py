"""The lines that scripts parse."""

import math

from MaxText.monitoring.step_line import (
    EvaluationReport,
    StepReport,
    duration,
    perplexity,
)

METRICS = {"loss": 2.5, "lm_loss": 2.25, "total_weights": 4096.0}


def test_the_line_of_maxtext_is_a_prefix_of_ours():
    report = StepReport(7, 0.5, METRICS, tokens_per_device=2048, tflops_per_device=1.25)
    maxtext = (
        "completed step: 7, seconds: 0.500, TFLOP/s/device: 2.500, Tokens/s/device: 4096.000, "
        "total_weights: 4096, loss: 2.500, lm_loss: 2.250, perplexity: 9.488"
    )
    assert report.line() == maxtext
    full = StepReport(
        7,
        0.5,
        {**METRICS, "grad_norm": 1.0, "learning_rate": 3e-4},
        tokens_per_device=2048,
        tflops_per_device=1.25,
        peak_tflops=5.0,
        seconds_left=3725,
    )
    assert full.line() == maxtext + ", mfu: 50.0%, grad_norm: 1.000, lr: 3.000e-04, eta: 1:02:05"
    assert full.row()["learning/current_learning_rate"] == 3e-4
    assert full.row()["perf/mfu"] == 0.5


def test_evaluation_line():
    report = EvaluationReport(10, 300.0, 100.0, 4, 1.5)
    assert report.line().startswith(
        "Completed eval after train step 10, loss=3.000, perplexity=20.086, total_weights=100"
    )
    assert math.isnan(EvaluationReport(10, 0.0, 0.0, 0, 1.0).loss)


def test_entmax_has_no_perplexity():
    metrics = {"loss": 2.5, "entmax_loss": 2.25, "total_weights": 4096.0}
    report = StepReport(7, 0.5, metrics, tokens_per_device=2048, tflops_per_device=1.25)
    assert report.line().endswith("loss: 2.500, lm_loss: 2.250")
    assert report.row()["learning/lm_loss"] == report.row()["learning/entmax_loss"] == 2.25
    assert "learning/perplexity" not in report.row()
    evaluated = EvaluationReport(10, 300.0, 100.0, 4, 1.5, has_perplexity=False)
    assert "perplexity" not in evaluated.line()
    assert "eval/avg_perplexity" not in evaluated.row()
    assert evaluated.row()["eval/avg_loss"] == 3.0


def test_masked_accuracy_where_it_was_counted():
    report = EvaluationReport(10, 300.0, 100.0, 4, 1.5, correct=25.0)
    assert report.line().endswith("seconds=1.500, masked_accuracy=0.2500")
    assert report.row()["eval/masked_accuracy"] == 0.25
    assert "eval/masked_accuracy" not in EvaluationReport(10, 300.0, 100.0, 4, 1.5).row()


def test_perplexity_of_any_loss():
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) == math.inf
    assert perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_duration():
    assert duration(59.6) == "0:01:00"
    assert duration(360_000) == "100:00:00"
    assert duration(math.inf) == "?"


def test_a_perplexity_of_sixty_digits_is_written_with_an_exponent():
    metrics = {"loss": 143.0, "lm_loss": 143.0, "total_weights": 1.0}
    assert ", perplexity: 1.271e+62" in StepReport(0, 1.0, metrics, 1, 1).line()
