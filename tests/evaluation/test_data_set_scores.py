"""Scores of a data set against sums taken token by token."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import scipy.special
from tokenizers import normalizers

from MaxText.config.data_sections import PreparationConfig
from MaxText.config.loading import load_config
from MaxText.errors import UserError
from MaxText.evaluation.data_set import score_data_set
from MaxText.evaluation.scores import SourceScore, source_table, total_score
from MaxText.evaluation.text_bytes import TextBytes
from MaxText.evaluation.validation import evaluate, make_eval_step
from MaxText.input_pipeline.loader import make_eval_iterator, open_eval_sources
from MaxText.input_pipeline.prepare.prepare import prepare
from MaxText.layers.assembly.model import Model
from MaxText.layers.entmax import entmax_loss
from tests.evaluation.small_trained import full_log_probabilities, tiny_trained
from tests.inference.small_models import byte_level
from tests.small_models import some_quick

# One id per byte, and eos, bos and pad.
VOCAB = 259
LENGTH = 16
TEXTS = ["Grüße aus Zürich, 漢字.", "x", "the quick brown fox jumps over the lazy dog", "a b", ""]


@pytest.fixture(scope="module")
def trained():
    return tiny_trained(vocab_size=VOCAB, max_target_length=LENGTH, base_num_decoder_layers=1)


def data_set(folder, texts=TEXTS, **keys):
    """Documents of bytes, all in the split `train`."""
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts), encoding="utf-8")
    keys = {"tokenizer_path": "bytes", "validation_fraction": 0.0, "prepare_num_workers": 1} | keys
    prepare(PreparationConfig(prepare_source=str(source), **keys), str(folder), lambda line: None)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return data_set(tmp_path_factory.mktemp("data") / "plain")


def configured(location, **keys):
    if location:
        keys = {"dataset_path": str(location), "eval_split": "train"} | keys
    else:
        keys["dataset_type"] = "synthetic"
    return load_config(**{"vocab_size": VOCAB, "max_target_length": LENGTH} | keys)


def score(trained, location, rows=4, **keys):
    """Scores of what lies at a location, by source."""
    config = configured(location, **{"per_device_batch_size": rows} | keys)
    text_bytes = TextBytes(config.masking.mlm_training, UserError("no tokenizer"))
    opened = open_eval_sources(config) if location else []
    return score_data_set(trained, opened, text_bytes, config, lambda line: None)


def batches_of(folder, **keys):
    """As the evaluation of training reads them."""
    return make_eval_iterator(configured(folder, **keys), 4)


def begin_of_window(target, last, stride):
    """First token that the window sees in which token `target` of a document counts.

    Without stride documents begin a window each and are cut every LENGTH tokens.
    """
    if stride is None:
        return (target - 1) // LENGTH * LENGTH
    end = LENGTH
    while end < target:
        end += stride
    return max(min(end, last) - LENGTH, 0)


def by_hand(trained, documents, stride):
    """Sum of nats over all targets, each from a forward pass of its own."""
    nats = 0.0
    for document in documents:
        for target in range(1, len(document)):
            begin = begin_of_window(target, len(document) - 1, stride)
            nats -= full_log_probabilities(trained, document[begin:target])[-1, document[target]]
    return nats


@pytest.mark.parametrize(
    ("stride", "joined"),
    some_quick(
        [(None, False), (5, False), (1, False), (5, True), (16, True), (1, True), (16, False)], 2
    ),
)
def test_windows_against_one_target_at_a_time(trained, folder, stride, joined):
    (source,) = open_eval_sources(configured(folder))
    ends = source.dataset.store.document_offsets
    ids = source.dataset.store.read(ends[:1], ends[-1:])
    documents = [ids[a:b].tolist() for a, b in itertools.pairwise(ends.tolist())]
    if joined:
        documents = [list(itertools.chain.from_iterable(documents))]
    keys = {"eval_stride": stride, "cross_document_attention": joined} if stride else {}
    (source_score,) = score(trained, folder, **keys or {"packing": False})
    assert source_score.num_targets == sum(len(document) - 1 for document in documents)
    np.testing.assert_allclose(
        source_score.total_nll, by_hand(trained, documents, stride), rtol=1e-6
    )


def test_the_same_as_the_evaluation_of_training(trained, folder):
    (source_score,) = score(trained, folder)
    step = trained.sharding.jit(make_eval_step(trained.model))
    report = evaluate(step, trained.params, batches_of(folder), step=0)
    assert (source_score.total_nll, source_score.num_targets) == (
        report.total_loss,
        report.total_weights,
    )
    assert source_score.num_batches == report.num_batches


@pytest.mark.parametrize("stride", [-1, 4])
def test_the_size_of_batches_changes_nothing(trained, folder, stride):
    scores = [score(trained, folder, rows, eval_stride=stride)[0] for rows in (1, 3, 64)]
    assert len({(source_score.num_targets, source_score.num_bytes) for source_score in scores}) == 1
    np.testing.assert_allclose(
        [source_score.total_nll for source_score in scores], scores[0].total_nll, rtol=1e-6
    )
    assert scores[0].num_batches > scores[2].num_batches == 1


def test_sources_add_up(trained, folder, tmp_path):
    other = data_set(tmp_path / "other", ["another text altogether", "and one more"])
    (first,), (second,) = score(trained, folder), score(trained, other)
    for keys in (
        {"grain_eval_files": f"{folder}; {other}"},
        {"dataset_path": f"{folder},2;{other},0.5"},
        {"dataset_path": "", "data_mixture_weights": [[str(folder), 0.9], [str(other), 0.1]]},
    ):
        sources = score(trained, folder, **keys)
        assert [source.name for source in sources] == [str(folder), str(other)]
        assert [source.total_nll for source in sources] == [first.total_nll, second.total_nll]
        total = total_score(sources)
        assert total.total_nll == first.total_nll + second.total_nll
        assert total.num_targets == first.num_targets + second.num_targets
        assert total.num_bytes == first.num_bytes + second.num_bytes
        # Not the mean of the means: the sources differ in size.
        assert total.loss == pytest.approx((first.total_nll + second.total_nll) / total.num_targets)
        assert total.perplexity == pytest.approx(math.exp(total.loss))


def test_bytes_are_those_of_the_targets(trained, folder, tmp_path):
    (plain,) = score(trained, folder)
    # The first byte of each text is not a target, and the empty text has none.
    assert plain.num_bytes == sum(max(len(text.encode()) - 1, 0) for text in TEXTS)
    assert plain.bits_per_byte == pytest.approx(plain.total_nll / math.log(2) / plain.num_bytes)
    with_bos = data_set(tmp_path / "bos", add_bos=True)
    for stride in (-1, 4):
        (source_score,) = score(trained, with_bos, eval_stride=stride)
        assert source_score.num_bytes == sum(len(text.encode()) for text in TEXTS)


def test_bytes_as_the_preparation_counted_them(trained, tmp_path):
    # Ids that do not tell how long the text was.
    tokenizer, path = byte_level(), str(tmp_path / "tokenizer.json")
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(path)
    texts = ["İstanbul ve İzmir", "Ab"]  # shorter in lower case, or longer
    with_bos = data_set(tmp_path / "bos", texts, tokenizer_path=path, add_bos=True)
    (source_score,) = score(trained, with_bos)
    assert source_score.num_bytes == sum(len(text.encode()) for text in texts)
    (part,) = score(trained, with_bos, rows=1, eval_steps=1)
    assert part.num_bytes is None
    plain = data_set(tmp_path / "plain", texts, tokenizer_path=path)
    (source_score,) = score(trained, plain)
    assert (source_score.num_bytes, source_score.bits_per_byte) == (None, None)
    assert "byte by byte; and not every token" in source_score.bytes_unavailable_reason
    note = f"bits/byte of {plain} is not shown: the ids of its tokenizer"
    assert note in source_table([source_score])


def test_a_part_of_the_split(trained, folder):
    (full,) = score(trained, folder, rows=1)
    (part,) = score(trained, folder, rows=1, eval_steps=2)
    assert part.num_batches == 2 < full.num_batches
    assert part.num_targets < full.num_targets
    (strided,) = score(trained, folder, rows=1, eval_steps=2, eval_stride=8)
    assert strided.num_batches == 2


def test_the_z_loss_is_no_part_of_it(trained, folder):
    section = trained.model.config
    objective = section.objective.model_copy(update={"z_loss_multiplier": 0.5})
    model = Model(section.model_copy(update={"objective": objective}))
    other = dataclasses.replace(trained, model=model)
    assert score(other, folder)[0].total_nll == score(trained, folder)[0].total_nll


def test_random_tokens(trained):
    (source_score,) = score(trained, None, eval_steps=3)
    assert source_score.num_targets == 3 * 4 * LENGTH
    assert source_score.bytes_unavailable_reason == "random tokens are not text"
    assert math.isfinite(source_score.loss)


def test_masked_accuracy_against_a_count(folder):
    # Half of the chosen tokens stay visible, and a tied head finds them again.
    keys = {
        "mlm_training": True,
        "mlm.mask_id": VOCAB - 1,
        "mlm.mask_prob": 0.5,
        "mlm.same_token_prob": 0.5,
        "mlm.random_token_prob": 0.0,
    }
    model_keys = {"vocab_size": VOCAB, "max_target_length": LENGTH, "logits_via_embedding": True}
    masked = tiny_trained(base_num_decoder_layers=1, scale=0.5, **model_keys, **keys)
    (source_score,) = score(masked, folder, **keys)
    hits = 0
    for batch in batches_of(folder, **keys):
        argmax_BT = np.argmax(masked.model.merge(masked.params)(batch), axis=-1)
        hits += int(((argmax_BT == batch.targets_BT) & (batch.loss_mask_BT > 0)).sum())
    assert 0 < hits < source_score.num_targets
    assert (source_score.correct, source_score.masked_accuracy) == (
        hits,
        hits / source_score.num_targets,
    )
    row = total_score([source_score, source_score]).to_json()
    assert (row["correct"], row["masked_accuracy"]) == (2 * hits, source_score.masked_accuracy)
    shown = source_table([source_score])
    assert "masked accuracy" in shown
    assert f"{source_score.masked_accuracy:.4f}" in shown


def test_another_objective_has_a_loss_of_its_own_and_lm_loss_beside_it(trained, folder):
    (plain,) = score(trained, folder)
    assert "masked accuracy" not in source_table([plain])
    assert "masked_accuracy" not in plain.to_json()
    keys = {"vocab_size": VOCAB, "max_target_length": LENGTH, "base_num_decoder_layers": 1}
    sparse = tiny_trained(loss_type="entmax", entmax_alpha=1.5, **keys)
    (source_score,) = score(sparse, folder)
    expected = nats = 0.0
    for batch in batches_of(folder):
        logits_BTV = sparse.model.merge(sparse.params)(batch)
        losses_BT = entmax_loss(logits_BTV, batch.targets_BT, 1.5)
        expected += float((losses_BT * batch.loss_mask_BT).sum())
        log_p_BTV = scipy.special.log_softmax(np.asarray(logits_BTV, float), axis=-1)
        log_p_BT = np.take_along_axis(log_p_BTV, np.asarray(batch.targets_BT)[..., None], -1)
        nats -= float((log_p_BT[..., 0] * batch.loss_mask_BT).sum())
    num_targets = source_score.num_targets
    np.testing.assert_allclose(source_score.loss, expected / num_targets, rtol=1e-5)
    np.testing.assert_allclose(source_score.lm_loss, nats / num_targets, rtol=1e-5)
    row = total_score([source_score]).to_json()
    assert row["loss_type"] == "entmax"
    np.testing.assert_allclose(row["perplexity"], np.exp(nats / num_targets), rtol=1e-4)
    np.testing.assert_allclose(row["bits_per_byte"], nats / math.log(2) / row["bytes"], rtol=1e-5)
    shown = source_table([source_score])
    assert f" {source_score.loss:.4f}  {source_score.lm_loss:.4f} " in shown
    assert "loss of entmax and lm_loss in nats per token" in shown


def test_labels_cannot_be_moved(trained, tmp_path):
    import pyarrow
    import pyarrow.parquet

    columns = {"input_ids": [[1, 2, 3, 4], [5, 6, 7, 8]]}
    columns["labels"] = [[2, 3, 4, -100], [-100, 7, 8, -100]]
    path = tmp_path / "rows_train.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    keys = {"data_cache_dir": str(tmp_path / "cache"), "tokenizer_path": "bytes"}
    (source_score,) = score(trained, path, **keys)
    assert source_score.num_targets == 5
    with pytest.raises(UserError, match=r"has labels.*Leave eval_stride=-1"):
        score(trained, path, eval_stride=4, **keys)


def test_documents_of_one_token_have_nothing_to_predict(trained, tmp_path):
    folder = data_set(tmp_path / "data", ["a", "b", "c"], add_eos=False)
    with pytest.raises(UserError, match=r"no document has two tokens.*cross_document_attention"):
        score(trained, folder, eval_stride=4)
    (source_score,) = score(trained, folder, eval_stride=4, cross_document_attention=True)
    assert source_score.num_targets == 2


def test_table_and_json(told):
    first = SourceScore("a", 10.0, 4, 20, "", 2, 2.0, {"data_set": "f"})
    second = SourceScore("b", 3e9, 2, None, "unknown", 1, 0.0)
    told(
        "\n".join(
            [source_table([first, second]), *(str(score.to_json()) for score in (first, second))]
        )
    )
    assert math.isnan(SourceScore("c", 0.0, 0, 0, "", 1, 1.0).loss)
