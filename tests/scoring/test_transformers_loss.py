"""The loss of text under transformers' own forward pass, window by window."""

import pytest

from MaxText.inference.own_configuration import load
from MaxText.scoring.evaluating import evaluate
from tests.inference.small_models import llama_folder

torch = pytest.importorskip("torch", reason="needs pip install '.[torch]'")
transformers = pytest.importorskip("transformers", reason="needs pip install '.[torch]'")

LENGTH, END = 32, 256
TEXTS = ["The first text, which is a good deal longer than one window. " * 3, "Grüße, 漢字!\n", "x"]


def nats_of(model, ids, stride):
    """Nats and targets of one document, the stride as in Hugging Face's guide to perplexity."""
    last, before, nats = len(ids) - 1, 0, 0.0
    end = min(LENGTH, last)
    while True:
        window = torch.tensor([ids[max(end - LENGTH, 0) : end + 1]])
        with torch.no_grad():
            logs = model(window[:, :-1]).logits.double().log_softmax(-1)
        scored = logs[0].gather(1, window[0, 1:, None])[before - end :]
        nats -= scored.sum().item()
        if end == last:
            return nats
        before, end = end, min(end + stride, last)


@pytest.mark.parametrize("stride", [32, 20, 1])
def test_the_same_loss(tmp_path, stride):
    import pyarrow
    import pyarrow.parquet

    folder = llama_folder(tmp_path / "model", with_bos=True)
    path = tmp_path / "text.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    documents = [
        [END, *tokenizer(text, add_special_tokens=False)["input_ids"], END] for text in TEXTS
    ]
    arguments = [
        f"load_parameters_path=hf:{folder}", f"grain_eval_files={path}", f"eval_stride={stride}",
        f"data_cache_dir={tmp_path / 'cache'}", "jax_cache_dir=",
    ]  # fmt: skip
    found = evaluate(load(arguments, "eval.py"), lambda line: None)["data"]["total"]
    expected = sum(nats_of(model, ids, stride) for ids in documents)
    assert found["nats"] == pytest.approx(expected, rel=1e-5)
    assert found["targets"] == sum(len(ids) - 1 for ids in documents)
    assert found["bytes"] == sum(len(text.encode()) for text in TEXTS)
