"""Tokenizes raw text at first use into a prepared dataset, `<cache_dir>/text/<hash>/`.

The hash covers everything that affects the ids, so a changed file gets a new folder.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from MaxText.config.data_sections import Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.corpus import Corpus, split_into_shards
from MaxText.input_pipeline.document_sources.source_files import resolve_files
from MaxText.input_pipeline.preparation.prepare import PrepareRequest, prepare_if_needed
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, read_manifest
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.storage import file_access

# Keys that affect the ids; others keep their defaults.
_KEYS = ("tokenizer_path", "tokenizer_type", "text_field", "add_bos", "add_eos")


def tokenize_to_cache(
    files: list[str], preparation: Preparation, cache_dir: Path, show: Callable[[str], None]
) -> Path:
    """Returns the folder of a dataset with the text of `files`, prepared at first use.

    If several processes (or machines that share `cache_dir`) prepare it, one works and the others
    wait. Finished shards of a killed process are kept.
    """
    if not preparation.tokenizer_path and preparation.tokenizer_type != "byte":
        raise UserError(
            f"{files[0]} holds text, and tokenizer_path is not set. Set it to the tokenizer of the "
            "model, name records of token ids, or prepare the text first (prepare_data.py)."
        )
    keys = preparation.model_dump(include={*_KEYS})
    tokenizer = load_tokenizer(preparation.tokenizer_path, preparation.tokenizer_type)
    decisive = {
        "files": [
            [file_access.absolute(path), size, tag]
            for path, size, tag in file_access.file_infos(files)
        ],
        "tokenizer": tokenizer.entry.sha256,
        "control ids": [tokenizer.entry.bos_id, tokenizer.entry.eos_id],
        **{key: keys[key] for key in ("text_field", "add_bos", "add_eos")},
    }
    name = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir / "text" / name
    if not (folder / MANIFEST_NAME).exists():
        show(f"Tokenizing the text of {_shown(files)} once, into {folder}")
        found = [file for path in files for file in resolve_files(path)]
        shards = split_into_shards(found, [""] * len(found), preparation.text_field)
        corpus = Corpus(_shown([file.name for file in found]), len(found), shards)
        keys |= {"prepare_source": ",".join(files), "validation_fraction": 0.0}
        request = PrepareRequest(Preparation(**keys), corpus, show)
        prepare_if_needed(request, folder, lambda: read_manifest(str(folder)))
    return folder


def _shown(files: Sequence[str]) -> str:
    return files[0] if len(files) == 1 else f"{len(files):,} files ({files[0]} ...)"
