"""Command line of convert.py."""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from MaxText.config.catalog import all_keys
from MaxText.config.maxtext_keys import ALIASES, find_unsupported
from MaxText.config.problems import close_matches
from MaxText.config.sources import ARGUMENT, YAML_PATH
from MaxText.conversion.families.registry import FAMILIES
from MaxText.conversion.hf_checkpoint import PREFIX as HUGGING_FACE
from MaxText.conversion.hf_checkpoint import is_file, is_hf_checkpoint, local_path
from MaxText.errors import UserError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
GROW = "grow"
_OTHER_PROGRAMS = ("maxtext", "fattorib")  # their checkpoints are given as maxtext:PATH
# Keys for training after growth.
_OF_TRAINING = ("growth_moments", "growth_data", "growth_old_slots_learning_rate")


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"is not one of {', '.join(choices)}.")
        return text

    return read


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    number = float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ") if match else 0
    if number < 1:
        raise ValueError("is not a size. Write for example max_shard_size=5GB.")
    return int(number)


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError("is not a positive number of tokens.")
    return int(text)


# Parser of each option besides from and to, and the source or target that it applies to.
_OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "export": (_one_of("stablehlo"), "to stablehlo"),
    "family": (_one_of(*FAMILIES), "to hf"),
    "dtype": (_one_of("float32", "bfloat16", "float16"), "to hf"),
    "max_shard_size": (_bytes, "to hf"),
    "query_scaling": (_one_of("weights", "model"), "from maxtext"),
    "length": (_tokens, "to stablehlo"),
    "tokenizer": (str, "to hf"),
}
_NAMES = ("from", "to", *_OPTIONS)


@dataclasses.dataclass
class Request:
    source: str = ""  # Hugging Face folder, run, or another program's checkpoint, without prefix
    source_kind: str = ""  # "hf", "run", "maxtext" or "fattorib"
    target: Path = Path()  # without prefix
    target_kind: str = ""  # "hf", "run" or "stablehlo"
    export: str = ""  # format of a single-file target, or ""
    family: str = ""  # model_type to export as; "" for the first match
    dtype: str = ""  # format of exported tensors; "" for the stored one
    max_shard_size: int = 5_000_000_000  # bytes; larger exports are sharded
    query_scaling: str = ""  # see MaxTextWeights
    length: int = 0  # sequence length of an exported program; 0 for max_target_length
    tokenizer: str = ""  # tokenizer folder to export; "" for that of the run or its dataset
    verify: bool = False  # compare with transformers before the result is kept
    grow: bool = False  # create a larger model; the target is a run
    config_file: str = ""  # configuration file argument, or ""
    keys: dict[str, str] = dataclasses.field(default_factory=dict)  # train.py's key=value arguments

    @property
    def arguments(self) -> list[str]:
        """Arguments for config.loading.load."""
        named = [self.config_file] if self.config_file else []
        return [*named, *(f"{name}={text}" for name, text in self.keys.items())]


def parse_arguments(arguments: Sequence[str]) -> Request:
    request, given = Request(), {}
    for argument in arguments:
        match = ARGUMENT.fullmatch(argument)
        name, text = match.groups() if match else ("", "")
        if argument == "--verify":
            request.verify = True
        elif argument == GROW:
            request.grow = True
        elif name in _NAMES:
            if name in given and given[name] != text:
                raise UserError(f"{name} is set twice: {given[name]} and {text}.")
            given[name] = text
        elif name:
            request.keys[name] = text
        elif YAML_PATH.fullmatch(argument) and not argument.startswith("-"):
            if request.config_file:
                raise UserError(f"{argument}: there is already {request.config_file}.")
            request.config_file = argument
        else:
            raise UserError(_unknown(argument))
    for name in [name for name in _OPTIONS if name in given]:
        try:
            setattr(request, name, _OPTIONS[name][0](given[name]))
        except ValueError as error:
            raise UserError(f"{name}={given[name]} {error}") from error
    _parse_from_and_to(request, given)
    (_check_growth if request.grow else _check_conversion)(request, given)
    return request


def _spelled(names: Sequence[str]) -> str:
    words = {"verify": "--verify", GROW: GROW}
    return " or ".join(words.get(name, f"{name}=...") for name in names)


def _check_spelling(request: Request) -> None:
    """Refuses misspelled options; the configuration refuses unknown keys."""
    known = all_keys()
    for name, text in request.keys.items():
        if name in known or name in ALIASES or find_unsupported(name):
            continue
        close = close_matches(name, {*_NAMES, "verify", *known})
        if {*_NAMES, "verify"}.intersection(close):
            raise UserError(
                f"{name}={text}: no such option or key. Did you mean {_spelled(close)}?"
            )


def _unknown(argument: str) -> str:
    close = close_matches(argument.lstrip("-").partition("=")[0], [*_NAMES, "verify", GROW])
    meant = f" Did you mean {_spelled(close[:1])}?" if close else ""
    if not argument.startswith("-") and os.path.exists(local_path(argument)):
        meant = f" Write from={argument} or to={argument}."
    return f"{argument}: no such option.{meant} --help explains them."


def _parse_from_and_to(request: Request, given: dict[str, str]) -> None:
    for name in ("from", "to"):
        if not given.get(name):
            alike = close_matches(name, request.keys)
            meant = f" Did you mean {name}= by {alike[0]}=?" if alike else ""
            raise UserError(
                f"{name}= is missing.{meant} Usage: convert.py from=SOURCE to=TARGET; see --help."
            )
    source, target = given["from"], given["to"]
    kind, colon, path = source.partition(":")
    if colon and kind in _OTHER_PROGRAMS:
        request.source, request.source_kind = path, kind
    else:
        request.source, request.source_kind = source, "hf" if is_hf_checkpoint(source) else "run"
    if target.partition(":")[0] in _OTHER_PROGRAMS and ":" in target:
        raise UserError(f"to={target}: this format can only be read. Export to=hf:FOLDER instead.")
    request.target_kind = "hf" if target.startswith(HUGGING_FACE) else request.export or "run"
    if request.export and request.target_kind == "hf":
        raise UserError(f"export={request.export} writes one file, but to={target} is a folder.")
    request.target = local_path(target.removeprefix(HUGGING_FACE))
    if str(request.target) in (".", ""):
        raise UserError(f"to={target} is not a new path. Write for example to={target}exported.")


def _check_conversion(request: Request, given: dict[str, str]) -> None:
    kinds = (request.source_kind, request.target_kind)
    if kinds == ("hf", "hf"):
        raise UserError("from= and to= are both Hugging Face folders. Copy the folder instead.")
    if request.source_kind == "run" and is_file(local_path(request.source)):
        raise UserError(
            f"from={request.source} is a file. Use a run folder, or hf:FOLDER with config.json and "
            "the weights."
        )
    if kinds == ("run", "run"):
        raise UserError(
            f"from={request.source} is already a run of this program. To export it, use "
            f"to=hf:{request.target}; to make a larger model, convert.py grow. MaxText's "
            "checkpoints are from=maxtext:..."
        )
    if request.verify and "hf" not in kinds:
        raise UserError(
            "--verify compares with transformers, so from= or to= must be a Hugging Face folder."
        )
    _check_spelling(request)
    if request.source_kind == "hf" and request.config_file:
        raise UserError(
            f"{request.config_file} has no effect: the model comes from the folder's config.json. "
            "Set single keys instead, for example max_target_length=2048."
        )
    if request.source_kind == "run" and request.keys and not request.config_file:
        name = next(iter(request.keys))
        raise UserError(
            f"{name}={request.keys[name]} has no effect: the model comes from the run's own "
            "configuration."
        )
    here = (f"from {request.source_kind}", f"to {request.target_kind}")
    for name, (_, place) in _OPTIONS.items():
        if name in given and place not in here:
            raise UserError(f"{name}={given[name]} has no effect on this conversion.")


def _check_growth(request: Request, given: dict[str, str]) -> None:
    if request.target_kind != "run" or request.source_kind not in ("run", "hf"):
        raise UserError(
            "grow reads a run or a Hugging Face folder and writes a run: convert.py grow from=RUN "
            "to=RUN slot_num=NUMBER. Convert other formats before or after."
        )
    if wrong := [name for name in given if name not in ("from", "to")]:
        raise UserError(f"{wrong[0]}={given[wrong[0]]} has no effect on grow.")
    if request.verify:
        raise UserError("--verify compares with transformers, which cannot grow models. Remove it.")
    _check_spelling(request)
    if wrong := [name for name in _OF_TRAINING if name in request.keys]:
        raise UserError(
            f"{wrong[0]}={request.keys[wrong[0]]} applies to the training that follows: pass it to "
            "train.py, with load_parameters_path set to the smaller run."
        )
    if not request.keys and not request.config_file:
        raise UserError(
            "grow: set the new size, for example slot_num=2140 or base_num_decoder_layers=24."
        )
