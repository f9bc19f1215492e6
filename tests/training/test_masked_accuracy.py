"""A small masked language model, from text to its accuracy, with a count by hand."""

import jax
import numpy as np
import pytest

from MaxText.configuration.training_sections import Mesh
from MaxText.input_pipeline.loader import eval_loader, train_loader
from MaxText.input_pipeline.rows.batch_plan import BatchPlan
from MaxText.parallelism.mesh import make_layout
from MaxText.training.evaluation import evaluate
from MaxText.training.step import make_eval_step
from tests.input_pipeline.small_data import write_data_set
from tests.small_models import tiny_config, trainer

VOCAB, LENGTH, ROWS = 32, 16, 32
MASK, CLS = VOCAB - 1, VOCAB - 2


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Texts that count upwards, so that hidden tokens follow from their neighbours."""
    folder = tmp_path_factory.mktemp("counting")
    rng = np.random.default_rng(0)
    documents = [
        (start + np.arange(LENGTH)) % (VOCAB - 2) for start in rng.integers(0, VOCAB - 2, 200)
    ]
    write_data_set(folder / "data", {"train": documents, "validation": documents[:30]}, VOCAB)
    return tiny_config(
        "gpt2",
        base_num_kv_heads=4,
        base_num_decoder_layers=2,
        dataset_type="grain",
        dataset_path=str(folder / "data"),
        vocab_size=VOCAB,
        max_target_length=LENGTH,
        steps=200,
        mlm_training=True,
        mlm_mask_id=MASK,
        mlm_cls_token_id=CLS,
    )


@pytest.mark.slow
def test_accuracy_of_a_model_that_has_learned(config):
    model, state, step = trainer(config)
    reading = {"masking": config.masking, "preparation": config.preparation, "vocab_size": VOCAB}
    plan = BatchPlan.constant(ROWS, LENGTH)
    batches = train_loader(config.data, plan=plan, num_steps=config.run.steps, **reading)
    layout = make_layout(Mesh(), jax.devices()[:1])
    losses = []
    for _ in range(config.run.steps):
        state, metrics = step(state, layout.place(next(batches), ROWS))
        losses.append(float(metrics["loss"]))
    batches.close()
    assert losses[-1] < 0.7 * losses[0]

    held_out = eval_loader(
        config.data, eval_steps=-1, max_target_length=LENGTH, global_batch_size=ROWS, **reading
    )
    eval_step = layout.jit(make_eval_step(model, count_correct=True))
    placed = (layout.place(batch, ROWS) for batch in held_out)
    report = evaluate(eval_step, state.params, placed, step=config.run.steps - 1)

    logits = jax.jit(lambda params, batch: model.merge(params)(batch))
    hits = targets = 0
    for batch in held_out:
        for row, chosen in enumerate(batch.weights_BT > 0):
            likeliest = np.argmax(logits(state.params, batch)[row], axis=-1)
            for place in np.flatnonzero(chosen):
                hits += likeliest[place] == batch.targets_BT[row, place]
                targets += 1
    assert report.total_weights == targets > 50
    assert report.masked_accuracy == hits / targets
    assert report.masked_accuracy > 3 / VOCAB, "no better than chance"
    assert report.row()["eval/masked_accuracy"] == report.masked_accuracy
