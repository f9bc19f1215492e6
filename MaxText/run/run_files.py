"""Files in a run folder besides its checkpoints."""

from pathlib import Path
from typing import Any

import jax

from MaxText.config.schema import Config
from MaxText.config.serialization import resolved_yaml


def write_run_files(run_folder: Any, config: Config, tokenizer: Path | None) -> None:
    """Writes config.yml and the tokenizer on process 0, so that the run needs no dataset."""
    from MaxText.conversion.tokenizer_copy import keep_tokenizer

    if jax.process_index() != 0:
        return
    (run_folder / "config.yml").write_text(resolved_yaml(config))
    if tokenizer is not None:
        keep_tokenizer(tokenizer, run_folder)
