"""What the command line of convert.py asks for. No jax is imported here."""

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from MaxText.configuration.catalogue import all_keys
from MaxText.configuration.maxtext_keys import ALIASES, absent
from MaxText.configuration.problems import nearest
from MaxText.conversion.families.known import FAMILIES
from MaxText.conversion.fattorib_checkpoint import PREFIX as FATTORIB
from MaxText.conversion.hugging_face_folder import PREFIX as HUGGING_FACE
from MaxText.conversion.hugging_face_folder import is_file, is_folder, local_path
from MaxText.conversion.maxtext_names import PREFIX as MAXTEXT
from MaxText.conversion.maxtext_names import QUERY_SCALINGS
from MaxText.errors import UserError

_ARGUMENT = re.compile(r"([A-Za-z_][\w.\-]*)=(.*)", re.DOTALL)
_YAML = re.compile(r".*\.ya?ml", re.IGNORECASE | re.DOTALL)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_DTYPES = ("float32", "bfloat16", "float16")
_OPTIONS = (
    "from", "to", "export", "family", "dtype", "max_shard_size", "query_scaling", "length",
    "tokenizer",
)  # fmt: skip
GROW = "grow"
# Keys about the training that follows a growth.
_OF_TRAINING = ("growth_moments", "growth_data", "growth_old_slots_learning_rate")


@dataclasses.dataclass
class Request:
    """A conversion.

    Attributes:
      source: a folder of Hugging Face, a run, or a checkpoint of another program, without its
        prefix.
      source_kind: "hf", "run", "maxtext" or "fattorib".
      target: where the result goes, without its prefix.
      target_kind: "hf", "run" or "stablehlo".
      family: model_type to export as; "" for the first that fits.
      dtype: format of exported tensors; "" for the one that they are stored in.
      max_shard_bytes: above it an export is several files.
      query_scaling: of a checkpoint of MaxText; "" for what its block does.
      length: tokens of an exported program; 0 for max_target_length.
      tokenizer: folder of the tokenizer to export; "" for that of the run or its data set.
      verify: compare with transformers before anything is left.
      grow: make a larger model; the target is a run.
      config_file: a configuration named first, or "".
      keys: key=value arguments that are those of train.py.
    """

    source: str = ""
    source_kind: str = ""
    target: Path = Path()
    target_kind: str = ""
    family: str = ""
    dtype: str = ""
    max_shard_bytes: int = 5_000_000_000
    query_scaling: str = ""
    length: int = 0
    tokenizer: str = ""
    verify: bool = False
    grow: bool = False
    config_file: str = ""
    keys: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """What configuration.loading.load reads."""
        named = [self.config_file] if self.config_file else []
        return [*named, *(f"{name}={text}" for name, text in self.keys.items())]


def read(arguments: Sequence[str]) -> Request:
    """Reads a command line.

    Raises:
      UserError: an option is unknown, has no usable value, or does not go with the others.
    """
    request, given = Request(), {}
    for argument in arguments:
        match = _ARGUMENT.fullmatch(argument)
        name, text = match.groups() if match else ("", "")
        if argument == "--verify":
            request.verify = True
        elif argument == GROW:
            request.grow = True
        elif name in _OPTIONS:
            if name in given and given[name] != text:
                raise UserError(f"{name} is given twice: {given[name]} and {text}.")
            given[name] = text
        elif name:
            request.keys[name] = text
        elif _YAML.fullmatch(argument) and not argument.startswith("-"):
            if request.config_file:
                raise UserError(f"{argument}: there is already {request.config_file}.")
            request.config_file = argument
        else:
            raise UserError(_unknown(argument))
    _take_options(request, given)
    _take_places(request, given)
    _check_combination(request, given)
    return request


def _spelled(names: Sequence[str]) -> str:
    words = {"verify": "--verify", GROW: GROW}
    return " or ".join(words.get(name, f"{name}=...") for name in names)


def _check_spelling(request: Request) -> None:
    """Refuses a name that is like an option and no key; the configuration refuses the others."""
    known = all_keys()
    for name, text in request.keys.items():
        if name in known or name in ALIASES or absent(name):
            continue
        close = nearest(name, {*_OPTIONS, "verify", *known})
        if {*_OPTIONS, "verify"}.intersection(close):
            raise UserError(
                f"{name}={text}: no such option or key. Did you mean {_spelled(close)}?"
            )


def _unknown(argument: str) -> str:
    close = nearest(argument.lstrip("-").partition("=")[0], [*_OPTIONS, "verify", GROW])
    meant = f" Did you mean {_spelled(close[:1])}?" if close else ""
    if not argument.startswith("-") and os.path.exists(local_path(argument)):
        meant = f" Write from={argument} or to={argument}."
    return f"{argument}: no such option.{meant} --help explains them."


def _take_options(request: Request, given: dict[str, str]) -> None:
    choices = {"family": tuple(FAMILIES), "dtype": _DTYPES, "query_scaling": QUERY_SCALINGS}
    for name, known in choices.items():
        if name in given:
            if given[name] not in known:
                raise UserError(f"{name}={given[name]} is none of {', '.join(known)}.")
            setattr(request, name, given[name])
    if "max_shard_size" in given:
        match = _SIZE.fullmatch(given["max_shard_size"])
        number = float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ") if match else 0
        if number < 1:
            raise UserError(
                f"max_shard_size={given['max_shard_size']} is no size. Write for example "
                "max_shard_size=5GB."
            )
        request.max_shard_bytes = int(number)
    request.tokenizer = given.get("tokenizer", "")
    if "length" in given:
        text = given["length"]
        if not (text.isascii() and text.isdigit() and int(text) > 0):
            raise UserError(f"length={text} is no number of tokens from 1.")
        request.length = int(text)


def _take_places(request: Request, given: dict[str, str]) -> None:
    for name in ("from", "to"):
        if not given.get(name):
            alike = nearest(name, request.keys)
            meant = f" Did you mean {name}= by {alike[0]}=?" if alike else ""
            raise UserError(
                f"{name}= is missing.{meant} Write: convert.py from=SOURCE to=TARGET; --help shows "
                "which."
            )
    source, target = given["from"], given["to"]
    if source.startswith(MAXTEXT):
        request.source, request.source_kind = source.removeprefix(MAXTEXT), "maxtext"
    elif source.startswith(FATTORIB):
        request.source, request.source_kind = source.removeprefix(FATTORIB), "fattorib"
    else:
        request.source = source
        request.source_kind = "hf" if is_folder(source) else "run"
    export = given.get("export", "")
    if export not in ("", "stablehlo"):
        raise UserError(f"export={export} is unknown. Write export=stablehlo, or leave it out.")
    if target.startswith((MAXTEXT, FATTORIB)):
        raise UserError(f"to={target}: this layout is read, not written. Write to=hf:FOLDER.")
    request.target_kind = "hf" if target.startswith(HUGGING_FACE) else export or "run"
    if export and request.target_kind == "hf":
        raise UserError(f"export={export} writes one file, but to={target} is a folder.")
    request.target = local_path(target.removeprefix(HUGGING_FACE))
    if str(request.target) in (".", ""):
        raise UserError(f"to={target} names nothing new. Write for example to={target}exported.")


def _check_combination(request: Request, given: dict[str, str]) -> None:
    kinds = (request.source_kind, request.target_kind)
    if request.grow:
        _check_growth(request, given)
        return
    if kinds == ("hf", "hf"):
        raise UserError("from= and to= are both folders of Hugging Face: copy the folder instead.")
    if request.source_kind == "run" and is_file(local_path(request.source)):
        raise UserError(
            f"from={request.source} is a file. Name the folder of a run, or hf:FOLDER with "
            "config.json and the weights."
        )
    if kinds == ("run", "run"):
        raise UserError(
            f"from={request.source} is a run of this program already. To export it, write "
            f"to=hf:{request.target}; MaxText's checkpoints are from=maxtext:...; convert.py grow "
            "makes a larger model of it."
        )
    if request.verify and "hf" not in kinds:
        raise UserError(
            "--verify compares with transformers, which reads folders of Hugging Face; neither "
            "from= nor to= is one."
        )
    _check_spelling(request)
    if request.source_kind == "hf" and request.config_file:
        raise UserError(
            f"{request.config_file} has no part in this: the folder's config.json decides. Single "
            "keys can be set, for example max_target_length=2048."
        )
    if request.source_kind == "run" and request.keys and not request.config_file:
        name = next(iter(request.keys))
        raise UserError(
            f"{name}={request.keys[name]} has no part in this: the run's own configuration decides."
        )
    meant_for = {
        "family": request.target_kind == "hf",
        "dtype": request.target_kind == "hf",
        "max_shard_size": request.target_kind == "hf",
        "tokenizer": request.target_kind == "hf",
        "query_scaling": request.source_kind == "maxtext",
        "length": request.target_kind == "stablehlo",
    }
    if wrong := [name for name, fits in meant_for.items() if name in given and not fits]:
        raise UserError(f"{wrong[0]}={given[wrong[0]]} has no effect on this conversion.")


def _check_growth(request: Request, given: dict[str, str]) -> None:
    if request.target_kind != "run" or request.source_kind not in ("run", "hf"):
        raise UserError(
            "grow makes a run of a run, or of a folder of Hugging Face: convert.py grow from=RUN "
            "to=RUN slot_num=NUMBER. Convert other formats before or after it."
        )
    if wrong := [name for name in given if name not in ("from", "to")]:
        raise UserError(f"{wrong[0]}={given[wrong[0]]} has no effect on grow.")
    if request.verify:
        raise UserError("--verify compares with transformers, which has no part in grow.")
    _check_spelling(request)
    if wrong := [name for name in _OF_TRAINING if name in request.keys]:
        raise UserError(
            f"{wrong[0]}={request.keys[wrong[0]]} is about the training that follows: give it to "
            "train.py, with load_parameters_path naming the smaller run."
        )
    if not request.keys and not request.config_file:
        raise UserError(
            "grow: how large? Name what grows, for example slot_num=2140 or "
            "base_num_decoder_layers=24."
        )
