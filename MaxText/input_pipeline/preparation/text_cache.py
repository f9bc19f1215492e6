"""Tokenizes raw text at first use into a prepared dataset, `<cache_dir>/text/<hash>/`.

The hash covers everything that affects the ids, so a changed file gets a new folder.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from MaxText.config.data_sections import Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.corpus import Corpus
from MaxText.input_pipeline.document_sources.shards import cut_into_shards
from MaxText.input_pipeline.document_sources.source_files import resolve_files
from MaxText.input_pipeline.preparation.preparing import make_once
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, read_manifest
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.storage import file_access


def open_text(
    files: list[str],
    *,
    tokenizer_path: str,
    tokenizer_type: str,
    text_field: str,
    add_bos: bool,
    add_eos: bool,
    cache_dir: str | Path,
    show: Callable[[str], None],
) -> Path:
    """Returns the folder of a dataset with the text of `files`, prepared at first use.

    If several processes (or machines that share `cache_dir`) prepare it, one works and the others
    wait. Finished shards of a killed process are kept.
    """
    assert files
    if not tokenizer_path and tokenizer_type != "byte":
        raise UserError(
            f"{files[0]} holds text, and tokenizer_path is not set. Give the tokenizer to read it "
            "with, or prepare the text into token records first (prepare_data.py)."
        )
    preparation = Preparation.model_validate(
        {
            "prepare_source": ",".join(files),
            "text_field": text_field,
            "tokenizer_path": tokenizer_path,
            "tokenizer_type": tokenizer_type,
            "add_bos": add_bos,
            "add_eos": add_eos,
            "validation_fraction": 0.0,
            "prepare_output_format": "bin",
        }
    )
    tokenizer = load_tokenizer(tokenizer_path, tokenizer_type)
    decisive = {
        "files": [
            [file_access.absolute(path), size, tag]
            for path, size, tag in file_access.file_infos(files)
        ],
        "tokenizer": tokenizer.entry.sha256,
        "control ids": [tokenizer.entry.bos_id, tokenizer.entry.eos_id],
        "text_field": text_field,
        "add_bos": add_bos,
        "add_eos": add_eos,
    }
    name = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(cache_dir).expanduser() / "text" / name
    if not (folder / MANIFEST_NAME).exists():
        show(f"Text of {_shown(files)}: tokenised now, and read from {folder} from then on")
        make_once(
            preparation,
            _corpus(files, text_field),
            folder,
            lambda: read_manifest(str(folder)),
            show,
        )
    return folder


def _corpus(files: Sequence[str], text_field: str) -> Corpus:
    found = [source_file for file in files for source_file in resolve_files(file)]
    units = cut_into_shards(found, [""] * len(found), text_field)
    return Corpus(_shown([source_file.name for source_file in found]), len(found), units)


def _shown(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{len(files):,} files ({files[0]} ...)"
