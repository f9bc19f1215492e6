"""Sums over held-out data."""

from MaxText.evaluation.validation import evaluate


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
