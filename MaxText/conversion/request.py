"""Command line of convert.py."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from MaxText.config import import_modules
from MaxText.config.command_line import ProgramOptions, read_options
from MaxText.config.keys import CountOrAuto, Parser, key
from MaxText.config.maxtext_keys import ALIASES
from MaxText.config.problems import ConfigIssue, ConfigurationError
from MaxText.config.schema import split_entry
from MaxText.conversion.families import FAMILIES
from MaxText.conversion.hf_checkpoint import PREFIX as HUGGING_FACE
from MaxText.conversion.hf_checkpoint import is_hf_checkpoint, local_path

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
GROW = "grow"
# Their checkpoints are given as maxtext:PATH.
OTHER_PROGRAMS = {"maxtext": "MaxText", "fattorib": "fattorib/transformer"}
# Entries of `growth` for training after growth.
_OF_TRAINING = ("opt_state", "data", "existing_slots_lr_scale")
# Options that only one kind of source or target has.
_BELONG_TO = {
    "length": "to stablehlo",
    "export": "to stablehlo",
    "family": "to hf",
    "dtype": "to hf",
    "max_shard_size": "to hf",
    "tokenizer": "to hf",
    "query_scaling": "from maxtext",
}


def _bytes(text: str) -> int:
    """Parses a size such as "5GB", in powers of 1000; ValueError if it is none."""
    match = _SIZE.fullmatch(text)
    num_bytes = 0.0
    if match:
        unit = match[2].upper() or " "
        num_bytes = float(match[1]) * 1000 ** " KMGT".index(unit)
    if num_bytes < 1:
        raise ValueError(f"{text!r} is not a size")
    return int(num_bytes)


class ConvertOptions(ProgramOptions):
    """Options of convert.py."""

    REQUIRED = ("from", "to")

    from_: str = key(
        "",
        "hf:FOLDER or hf:HUB_ID (from the local cache; nothing is downloaded), a run of this "
        "program (its newest checkpoint, or checkpoints/STEP), maxtext:FOLDER, or fattorib:FILE.",
    )
    to: str = key("", "hf:FOLDER, a run folder, or a file.")
    verify: bool = key(
        False,
        "Run both models on the same tokens and compare logits and loss before the result is kept; "
        "needs pip install '.[torch]'.",
    )
    dtype: Literal["", "float32", "bfloat16", "float16"] = key(
        "", "Format of exported tensors; default: as stored."
    )
    family: Literal["", *FAMILIES] = key(  # type: ignore[valid-type]
        "", "Export as this family if several match: llama, mistral, ..."
    )
    max_shard_size: Annotated[int, Parser(_bytes, "a size such as 5GB")] = key(
        5_000_000_000, "Split larger exports into several files with an index."
    )
    tokenizer: str = key("", "Tokenizer to export; default: that of the run's data set.")
    query_scaling: Literal["", "weights", "model"] = key("", "Of MaxText checkpoints.")
    export: Literal["", "stablehlo"] = key("", "Write the forward pass as one file.")
    length: CountOrAuto = key(
        -1, "Sequence length of export=stablehlo; default: max_target_length.", unit="tokens"
    )


class ConvertArgs(ConvertOptions):
    """The options, and what they say about source and target."""

    source: str  # Hugging Face folder, run, or another program's checkpoint, without prefix
    source_kind: str  # "hf", "run", "maxtext" or "fattorib"
    target: Path  # without prefix
    target_kind: str  # "hf", "run" or "stablehlo"
    grow: bool  # create a larger model; the target is a run
    config_file: str  # configuration file argument, or ""
    keys: dict[str, str]  # train.py's key=value arguments

    @property
    def arguments(self) -> list[str]:
        """Arguments for config.loading.load."""
        named = [self.config_file] if self.config_file else []
        return [*named, *(f"{name}={text}" for name, text in self.keys.items())]


def parse_arguments(arguments: Sequence[str]) -> ConvertArgs:
    """Parses the command line of a conversion.

    Raises ConfigurationError with all its problems.
    """
    options, argument_words = read_options(ConvertOptions, arguments)
    for word in argument_words.others:
        if word != GROW:
            fact = ("write", f"from={word} or to={word}, or {GROW}")
            issue = ConfigIssue(f"{word}: no such option", ("command line",), (fact,))
            argument_words.problems.append(issue)
    first_file = next(iter(argument_words.files), "")
    for word in argument_words.files[1:]:
        argument_words.problems.append(ConfigIssue(f"{word}: there is already {first_file}"))
    argument_words.check()
    kind, colon, path = options.from_.partition(":")
    if colon and kind in OTHER_PROGRAMS:
        source = path
    else:
        source = options.from_
        kind = "hf" if is_hf_checkpoint(options.from_) else "run"
    to_hf = options.to.startswith(HUGGING_FACE)
    request = ConvertArgs(
        **dict(options),
        source=source,
        source_kind=kind,
        target=local_path(options.to.removeprefix(HUGGING_FACE)),
        target_kind="hf" if to_hf else options.export or "run",
        grow=GROW in argument_words.others,
        config_file="".join(argument_words.files),
        keys=dict(word.split("=", 1) for word in argument_words.keys),
    )
    if request.grow:
        problems = list(_growth_problems(request))
        ends = ()
    else:
        problems = list(_conversion_problems(request))
        ends = (f"from {request.source_kind}", f"to {request.target_kind}")
    for name in argument_words.given:
        if name in _BELONG_TO and _BELONG_TO[name] not in ends:
            problems.append(f"{name}={getattr(request, name)} has no effect on this conversion.")
    if problems:
        raise ConfigurationError([ConfigIssue(problem) for problem in dict.fromkeys(problems)])
    return request


def _conversion_problems(request: ConvertArgs) -> Iterator[str]:
    """Yields what is wrong with a request to convert."""
    kinds = (request.source_kind, request.target_kind)
    if request.to.startswith(tuple(f"{program}:" for program in OTHER_PROGRAMS)):
        yield f"to={request.to}: this format can only be read. Export to=hf:FOLDER instead."
    elif request.source_kind == request.target_kind:
        yield (
            f"from={request.source} already has the format of to={request.to}. To export a run, "
            "use to=hf:FOLDER; to make a larger model, convert.py grow. MaxText's checkpoints are "
            "from=maxtext:..."
        )
    elif request.verify and "hf" not in kinds:
        yield "--verify compares with transformers, so from= or to= must be a Hugging Face folder."
    if request.source_kind == "hf" and request.config_file:
        yield (
            f"{request.config_file} has no effect: the model comes from the folder's config.json. "
            "Set single keys instead, for example max_target_length=2048."
        )
    ignored = [name for name in request.keys if name != import_modules.KEY]
    if ignored and request.source_kind == "run" and not request.config_file:
        name = ignored[0]
        yield (
            f"{name}={request.keys[name]} has no effect: the model comes from the run's own "
            "configuration."
        )


def _growth_problems(request: ConvertArgs) -> Iterator[str]:
    """Yields what is wrong with a request to grow a model."""
    if request.target_kind != "run" or request.source_kind not in ("run", "hf"):
        yield (
            "grow reads a run or a Hugging Face folder and writes a run: convert.py grow from=RUN "
            "to=RUN slot_num=NUMBER. Convert other formats before or after."
        )
    if request.verify:
        yield "--verify compares with transformers, which cannot grow models. Remove it."
    for name, text in request.keys.items():
        key, entry = split_entry(ALIASES.get(name, name))
        if key == "growth" and entry in _OF_TRAINING:
            yield (
                f"{name}={text} applies to the training that follows: pass it to train.py, with "
                "load_parameters_path set to the smaller run."
            )
    if not request.keys and not request.config_file:
        yield "grow: set the new size, for example slot_num=2140 or base_num_decoder_layers=24."
