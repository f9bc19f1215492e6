"""Copies tokenizer files."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from etils import epath

from MaxText.errors import UserError
from MaxText.input_pipeline.token_store.manifest import MANIFEST_NAME, TOKENIZER_NAME, read_manifest
from MaxText.input_pipeline.tokenization.determinism import deterministic_file, without_sampling
from MaxText.input_pipeline.tokenization.interface import CONFIG_NAME, read_json, read_text
from MaxText.input_pipeline.tokenization.load_tokenizer import TRANSFORMERS_FILES
from MaxText.value_types import JsonValue

if TYPE_CHECKING:
    import tokenizers

RUN_FOLDER_NAME = "tokenizer"  # in a run folder, next to its checkpoints

_FILES = (*TRANSFORMERS_FILES, "chat_template.jinja")
_TABLES = ("vocab.json", "added_tokens.json")


def check_ids(folder: Path, vocab_size: int) -> None:
    """Refuses an unreadable tokenizer or ids beyond the embedding table."""
    # Older tokenizers are a vocabulary and a table of added tokens.
    names = (TOKENIZER_NAME,) if (folder / TOKENIZER_NAME).is_file() else _TABLES
    for path in (folder / name for name in names):
        vocabulary = _opened(path).get_vocab() if path.name == TOKENIZER_NAME else read_json(path)
        largest = max((id_ for id_ in vocabulary.values() if isinstance(id_, int)), default=-1)
        if largest >= vocab_size:
            raise UserError(
                f"{path} has ids up to {largest}, but the model has vocab_size={vocab_size}. It is "
                "the tokenizer of another model: copy the right one, or remove it."
            )


def _opened(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    text = read_text(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{path} cannot be read: {error}. Copy it again.") from error


def copy_files(
    source: Path, target: Path | epath.Path, possible: Iterable[str] = _FILES
) -> list[str]:
    """Copies existing tokenizer files, also to remote folders; returns names.

    The copies encode without dropout and without sampling, as the tokenizers of this package do.
    """
    names = [name for name in possible if (source / name).is_file()]
    if names:
        target.mkdir(parents=True, exist_ok=True)
    for name in names:
        content = (source / name).read_bytes()
        (target / name).write_bytes(deterministic_file(name, content))
    return names


def write_json(path: Path | epath.Path, value: Mapping[str, JsonValue]) -> None:
    """Writes a JSON file as transformers does: indented, with characters outside ASCII."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export_tokenizer(source: Path, target: Path) -> tuple[list[str], dict[str, int]]:
    """Copies a tokenizer for `AutoTokenizer.from_pretrained`.

    Returns the files, and special token ids by config.json key.
    """
    names = copy_files(source, target)
    if TOKENIZER_NAME not in names:
        return names, {}
    settings = read_json(target / CONFIG_NAME)
    # Tokenizers trained by prepare_data.py have no class in transformers.
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    write_json(target / CONFIG_NAME, settings)
    tokenizer = _opened(target / TOKENIZER_NAME)
    ids = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        number = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if number is not None:
            ids[f"{name}_id"] = number
    if settings.get("add_bos_token") is True and "bos_token_id" in ids:
        _prepend(target / TOKENIZER_NAME, tokenizer, ids["bos_token_id"])
    return sorted({*names, CONFIG_NAME}), ids


def _prepend(path: Path, tokenizer: "tokenizers.Tokenizer", bos_id: int) -> None:
    """Makes a tokenizer.json begin texts with bos, unless it does.

    transformers takes this from the file's post-processor and not from add_bos_token, as do vLLM
    and lm-evaluation-harness, which tokenize with it.
    """
    from tokenizers.processors import Sequence, TemplateProcessing

    if tokenizer.encode("a").ids[:1] == [bos_id]:
        return
    bos = tokenizer.id_to_token(bos_id)
    template = TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, bos_id)]
    )
    existing = tokenizer.post_processor
    tokenizer.post_processor = Sequence([existing, template]) if existing else template
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def keep_tokenizer(source: Path, run_folder: epath.Path) -> None:
    """Copies a dataset's tokenizer into a run, for use from any location.

    Its tokenizer_config.json records whether texts of the dataset begin with bos.
    """
    folder = source if source.is_dir() else source.parent
    names = {source.name, "special_tokens_map.json"}
    if source.is_dir():
        kinds = ("*.model", "*.tiktoken")
        names = {*_FILES, *(path.name for kind in kinds for path in source.glob(kind))}
    target = run_folder / RUN_FOLDER_NAME
    target.mkdir(parents=True, exist_ok=True)
    copy_files(folder, target, sorted(names - {CONFIG_NAME}))
    settings = without_sampling(read_json(folder / CONFIG_NAME))
    if (folder / MANIFEST_NAME).is_file():
        settings["add_bos_token"] = bool(read_manifest(str(folder)).options.get("add_bos"))
    write_json(target / CONFIG_NAME, settings)
