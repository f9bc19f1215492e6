"""Prompts of decode.py."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from MaxText.config.inference_sections import Decoding
from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.interface import without_surrogates

# Fields that the output adds to those of a prompt's line.
ADDED_FIELDS = (
    "index", "sample", "completion", "finish_reason", "num_prompt_tokens", "tokens",
    "log_probabilities",
)  # fmt: skip


class Prompt(NamedTuple):
    """A text to continue, and its .jsonl fields, which the output repeats."""

    text: str
    fields: dict[str, Any]


def read_prompts(section: Decoding) -> list[Prompt]:
    """Returns the prompts of prompt_file, or else the one in `prompt`.

    Raises UserError if the file is unreadable or empty, or a line has no prompt.
    """
    if not section.prompt_file:
        return [Prompt(without_surrogates(section.prompt), {})]
    path = Path(section.prompt_file).expanduser()
    try:
        # Only \n ends a line: a prompt may hold any other separator.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"prompt_file={path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"prompt_file={path} is no UTF-8 text, at offset {error.start}.") from error
    numbered = [(n, line.removesuffix("\r")) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"prompt_file={path} has no line with text.")
    if path.suffix != ".jsonl":
        return [Prompt(line, {}) for _, line in numbered]
    return [_from_json(path, number, line) for number, line in numbered]


def _from_json(path: Path, number: int, line: str) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"prompt_file={path}, line {number} is not JSON: {error}.") from error
    text = fields.get("prompt") if isinstance(fields, dict) else None
    if not isinstance(text, str):
        raise UserError(
            f'prompt_file={path}, line {number} has no text in the field "prompt". Write for '
            'example {"prompt": "I love to"}.'
        )
    if taken := [name for name in ADDED_FIELDS if name in fields]:
        raise UserError(
            f"prompt_file={path}, line {number} has the field {taken[0]!r}, which the output needs "
            "for what is generated. Give it another name."
        )
    return Prompt(without_surrogates(text), fields)
