"""The model card of an exported folder: README.md, as the Hugging Face Hub shows it.

It says how the model was trained, from the record of the run: command, commit of the program, data,
tokens, and losses at the exported step.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from MaxText.conversion.family import Family
from MaxText.conversion.weight_source import RunWeights, WeightSource
from MaxText.errors import UserError
from MaxText.formatting import short_count
from MaxText.monitoring.events import MAIN_KEYS
from MaxText.monitoring.json_lines import to_json_value
from MaxText.monitoring.run_record import RunHistory, read_run
from MaxText.monitoring.step_line import perplexity, shown_perplexity

MODEL_CARD = "README.md"


def write_model_card(
    folder: Path,
    name: str,
    weights: WeightSource,
    family: Family,
    record: Mapping[str, Any],
    *,
    unsupported: str,
) -> None:
    """Writes the model card.

    Args:
      folder: The exported folder.
      name: Its name, the heading.
      weights: The source of the weights.
      family: The family of the folder.
      record: That of the import, if the model was imported.
      unsupported: What transformers lacks of the model; "" if it loads the folder.
    """
    is_causal = weights.config.model.attention.causal
    lines = [
        "---",
        *([] if unsupported else ["library_name: transformers"]),
        *(["pipeline_tag: text-generation"] if is_causal else []),
        "tags:",
        "- jaxpretrain",
        "---",
        "",
        f"# {name}",
        "",
        *_model_lines(weights, family),
        "",
        *_training_lines(weights, record),
        "## Use",
        "",
        *_use_lines(name, unsupported),
    ]
    (folder / MODEL_CARD).write_text("\n".join([*lines, ""]), encoding="utf-8")


def _model_lines(weights: WeightSource, family: Family) -> list[str]:
    shape = weights.config.model.shape
    dimensions = shape.dimensions
    return _table(
        {
            "architecture": family.architecture,
            "parameters": f"{weights.model.num_parameters:,}",
            "layers": dimensions.num_layers,
            "width": dimensions.emb_dim,
            "context": f"{shape.max_target_length:,} tokens",
            "vocabulary": f"{shape.vocab_size:,} tokens",
        }
    )


def _training_lines(weights: WeightSource, record: Mapping[str, Any]) -> list[str]:
    """Returns the section about training, as far as the run's record tells."""
    history = _history(weights)
    if history is None:
        source = str(record.get("path") or weights.description)
        return ["## Training", "", f"Converted from `{source}`, which has no record of a run.", ""]
    assert isinstance(weights, RunWeights)
    facts = history.facts
    provenance = facts.get("provenance") or {}
    step = weights.stored.step
    keys = {name: history.config[name] for name in MAIN_KEYS if name in history.config}
    data = facts.get("data") or {}
    rows = {
        "step": f"{step:,} of {facts.get('num_steps', 0):,}" if step is not None else None,
        "training tokens": _progress(history, step, "progress/tokens"),
        "training FLOPs": _progress(history, step, "progress/flops"),
        "data": data.get("train"),
        "SHA-256 of the tokenizer": data.get("tokenizer"),
        **_losses(history, step),
        "commit of the program": provenance.get("commit"),
        "packages": ", ".join(f"{n} {v}" for n, v in (provenance.get("packages") or {}).items()),
        "devices": f"{facts.get('num_devices')} x {facts.get('device_kind')}",
    }
    lines = ["## Training", "", *_table(rows), ""]
    if provenance.get("command"):
        lines += ["```bash", provenance["command"], "```", ""]
    lines += ["Main keys of the configuration:", "", "```yaml"]
    lines += [f"{name}: {json.dumps(to_json_value(value))}" for name, value in keys.items()]
    return [*lines, "```", ""]


def _history(weights: WeightSource) -> RunHistory | None:
    """Returns the record of the run of the weights; None if they have none."""
    if not isinstance(weights, RunWeights):
        return None
    try:
        return read_run(weights.stored.folder.parent.parent)
    except UserError:
        return None  # imported weights, or a moved checkpoint


def _newest(rows: Sequence[Mapping[str, Any]], step: int | None) -> Mapping[str, Any]:
    """Returns the last row up to a step; empty without one."""
    until = [row for row in rows if step is None or row["step"] <= step]
    return until[-1] if until else {}


def _progress(history: RunHistory, step: int | None, tag: str) -> str | None:
    value = _newest(history.steps, step).get(tag)
    return None if value is None else short_count(value)


def _losses(history: RunHistory, step: int | None) -> dict[str, str | None]:
    """Returns the losses of the last report and of the last evaluation up to a step."""
    training = _newest(history.steps, step)
    evaluation = _newest(history.evaluations, step)
    unit = " nats per token" if history.objective_in_nats else ""
    rows: dict[str, str | None] = {}
    loss = training.get(history.loss_tag)
    if loss is not None:
        rows["training loss"] = f"{loss:.4f}{unit} (step {training['step']:,})"
    loss = evaluation.get("eval/avg_loss")
    if loss is not None:
        rows["validation loss"] = f"{loss:.4f}{unit} (after step {evaluation['step']:,})"
    lm_loss = evaluation.get("eval/lm_loss")
    if lm_loss is not None:
        rows["validation perplexity"] = shown_perplexity(perplexity(lm_loss))
    for name, value in evaluation.items():
        if name.startswith("eval/tasks/") and value is not None:
            rows[name.removeprefix("eval/tasks/")] = f"{value:.4f}"
    return rows


def _use_lines(name: str, unsupported: str) -> list[str]:
    if unsupported:
        return [
            f"transformers has no {unsupported}. The programs that wrote this folder read it:",
            "",
            "```bash",
            f"python MaxText/decode.py load_parameters_path=hf:{name} prompt='The '",
            "```",
        ]
    return [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        "```",
    ]


def _table(rows: Mapping[str, Any]) -> list[str]:
    """Returns a table of two columns, without rows that are unknown."""
    known_rows = {name: value for name, value in rows.items() if value not in (None, "")}
    cells = {name: str(value).replace("|", "\\|") for name, value in known_rows.items()}
    return ["| | |", "|---|---|", *(f"| {name} | {cell} |" for name, cell in cells.items())]
