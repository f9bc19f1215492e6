"""Prompts and output file of decode.py."""

import json
from pathlib import Path
from typing import IO, Any, NamedTuple

from MaxText.config.inference_sections import DecodingConfig
from MaxText.errors import UserError
from MaxText.inference.text_files import check_not_input, json_rows, nonblank_lines, read_text_file
from MaxText.input_pipeline.tokenization.interface import without_surrogates

# Fields that the output adds to those of a prompt's line.
ADDED_FIELDS = (
    "index", "sample", "completion", "finish_reason", "num_prompt_tokens", "tokens",
    "log_probabilities",
)  # fmt: skip


class Prompt(NamedTuple):
    """A text to continue, and its .jsonl fields for the output."""

    text: str
    extra_fields: dict[str, Any]


def read_prompts(section: DecodingConfig) -> list[Prompt]:
    """Returns the prompts of prompt_file, or else the one in `prompt`.

    Raises UserError if the file is unreadable or empty, or a line has no prompt.
    """
    path = section.prompt_file
    if not path:
        return [Prompt(without_surrogates(section.prompt), {})]
    text, location = read_text_file(path, "prompt_file"), f"prompt_file={path}"
    if not path.endswith(".jsonl"):
        prompts = [Prompt(line.removesuffix("\r"), {}) for _, line in nonblank_lines(text)]
    else:
        prompts = []
        for number, prompt, fields in json_rows(text, "prompt", location):
            if taken := [name for name in ADDED_FIELDS if name in fields]:
                raise UserError(
                    f"{location}:{number} has the field {taken[0]!r}, which the output adds. "
                    "Rename it."
                )
            prompts.append(Prompt(prompt, fields))
    if not prompts:
        raise UserError(f"{location} is empty. Write one prompt per line.")
    return prompts


class JsonlWriter:
    """JSON lines, one per finished text. Overwrites the file."""

    def __init__(self, name: str, prompt_file: str):
        """Checks that `name` is writable and not the prompt file."""
        self._path = Path(name).expanduser() if name else None
        self._file: IO[str] | None = None
        if self._path is None:
            return
        check_not_input("decode_output_path", name, "prompt_file", prompt_file)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Checks write access without truncating an existing file.
            self._path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> UserError:
        return UserError(f"decode_output_path={self._path} cannot be written: {error.strerror}.")

    def add(self, row: dict[str, Any]) -> None:
        if self._path is None:
            return
        # Writes a lone surrogate of a prompt's fields as the escape it was read from.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
        try:
            if self._file is None:
                self._file = self._path.open("w", encoding="utf-8")
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._file = None  # closing it would fail as well
            raise self._write_error(error) from error

    def __enter__(self) -> "JsonlWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._file is not None:
            self._file.close()
