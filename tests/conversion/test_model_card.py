"""The model card of an export: what the record of the run says of the exported step."""

import re

import pytest
import yaml

from MaxText.monitoring.events import Event
from MaxText.monitoring.json_lines import EventFile
from tests.conversion.running import names, run
from tests.conversion.small_folders import random, tokenformer, write


def table(text, heading=""):
    """{name: value} of the first table after a heading."""
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", text[text.index(heading) :], re.MULTILINE)
    return dict(rows)


def record(folder, **fields):
    """The record of three steps; the exported checkpoint is that of step 0."""
    events = EventFile(folder, 0)
    provenance = {
        "command": "python MaxText/train.py configs/gpt2.yml run_name=first",
        "commit": "c0ffee",
        "packages": {"jax": "0.12"},
    }
    start = {
        "run_name": "first",
        "num_steps": 3,
        "num_devices": 8,
        "device_kind": "TPU v5p",
        "data": {"train": "data/corpus", "tokenizer": "abc"},
        "provenance": provenance,
    } | fields
    events.write(Event("start", 1.0, step=0, fields=start))
    for step in range(3):
        losses = {"learning/lm_loss": 5.0 - step, "learning/loss": 5.0 - step}
        progress = {"progress/tokens": 1000.0 * (step + 1), "progress/flops": 2e9}
        events.write(Event("step", 2.0 + step, step=step, fields=losses | progress))
        evaluation = {"eval/avg_loss": 6.0 - step, "eval/lm_loss": 6.0 - step}
        evaluation["eval/tasks/arc/bits_per_byte"] = 1.5 - step / 4
        events.write(Event("evaluation", 2.5 + step, step=step, fields=evaluation))
    events.close()


def test_the_card_of_a_run(here):
    write(here / "hf", *random("llama"))
    run("from=hf:hf", "to=run")
    record(here / "run")
    assert "README.md" in run("from=run", "to=hf:out")
    text = (here / "out" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert metadata == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["jaxpretrain"],
    }
    assert body.startswith("\n# out\n")
    assert table(body)["architecture"] == "LlamaForCausalLM"
    training = table(body, "## Training")
    assert training["step"] == "0 of 3"
    assert training["training tokens"] == "1K"
    assert training["data"] == "data/corpus"
    assert training["training loss"] == "5.0000 nats per token (step 0)"  # not of later steps
    assert training["validation loss"] == "6.0000 nats per token (after step 0)"
    assert training["validation perplexity"] == "403.429"
    assert training["arc/bits_per_byte"] == "1.5000"
    assert training["commit of the program"] == "c0ffee"
    assert training["devices"] == "8 x TPU v5p"
    assert "```bash\npython MaxText/train.py configs/gpt2.yml run_name=first\n```" in body
    assert 'AutoModelForCausalLM.from_pretrained("out")' in body
    assert "None" not in body


@pytest.mark.parametrize("has_files", [True, False], ids=["imported", "damaged"])
def test_the_card_of_weights_without_a_record(here, has_files):
    write(here / "hf", *random("llama"))
    run("from=hf:hf", "to=run")
    if not has_files:
        (here / "run" / "events.jsonl").write_text("{}\n")
    run("from=run", "to=hf:out")
    text = (here / "out" / "README.md").read_text()
    assert "which has no record of a run" in text
    assert table(text)["architecture"] == "LlamaForCausalLM"


def test_the_card_of_a_model_that_transformers_does_not_have(here):
    write(here / "hf", *tokenformer())
    run("from=hf:hf", "to=run")
    run("from=run", "to=hf:out")
    text = (here / "out" / "README.md").read_text()
    assert "library_name" not in text
    assert "decode.py load_parameters_path=hf:out" in text
    assert "README.md" in names(here / "out")
