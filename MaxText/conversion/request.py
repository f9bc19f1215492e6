"""Command line of convert.py."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from MaxText.config import import_modules
from MaxText.config.keys import CountOrAuto
from MaxText.config.maxtext_keys import ALIASES
from MaxText.config.problems import ConfigIssue, ConfigurationError
from MaxText.config.program_options import option, read_options
from MaxText.conversion.families import FAMILIES
from MaxText.conversion.hf_checkpoint import PREFIX as HUGGING_FACE
from MaxText.conversion.hf_checkpoint import is_hf_checkpoint, local_path

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
GROW = "grow"
# Their checkpoints are given as maxtext:PATH.
OTHER_PROGRAMS = {"maxtext": "MaxText", "fattorib": "fattorib/transformer"}
# Entries of `growth` for training after growth.
_OF_TRAINING = ("growth.opt_state", "growth.data", "growth.existing_slots_lr_scale")
# Options that only one kind of source or target has.
_BELONG_TO = {
    "length": "to stablehlo",
    "export": "to stablehlo",
    "family": "to hf",
    "dtype": "to hf",
    "max_shard_size": "to hf",
    "tokenizer": "to hf",
    "query_scaling": "from maxtext",
    "average": "from run",
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of convert.py."""

    from_: str = option(
        "",
        "hf:FOLDER or hf:HUB_ID (from the local cache; nothing is downloaded), a run of this "
        "program (its newest checkpoint, or checkpoints/STEP), maxtext:FOLDER, or fattorib:FILE.",
        required=True,
    )
    to: str = option("", "hf:FOLDER, a run folder, or a file.", required=True)
    verify: bool = option(
        False,
        "Run both models on the same tokens and compare logits and loss before the result is kept; "
        "needs pip install '.[torch]'.",
    )
    dtype: str = option(
        "",
        "Format of exported tensors; default: as stored.",
        choices=("float32", "bfloat16", "float16"),
    )
    family: str = option(
        "",
        "Export as this family if several match: llama, mistral, ...",
        choices=tuple(FAMILIES),
        metavar="FAMILY",
    )
    max_shard_size: int = option(
        5_000_000_000,
        "Split larger exports into several files with an index.",
        read=_bytes,
        accepts="a size such as 5GB",
        metavar="SIZE",
    )
    tokenizer: str = option("", "Tokenizer to export; default: that of the run's data set.")
    average: bool = option(
        False, "Take the average of a run's parameters (parameter_average) in place of these."
    )
    query_scaling: str = option("", "Of MaxText checkpoints.", choices=("weights", "model"))
    export: str = option("", "Write the forward pass as one file.", choices=("stablehlo",))
    length: CountOrAuto = option(
        -1,
        "Sequence length of export=stablehlo; default (-1): max_target_length.",
        metavar="TOKENS",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertArgs(ConvertOptions):
    """A requested conversion.

    Attributes:
      source: Hugging Face folder, run, or another program's checkpoint, without prefix.
      source_kind: "hf", "run", "maxtext" or "fattorib".
      target: Path without prefix.
      target_kind: "hf", "run" or "stablehlo".
      grow: Whether to create a larger model; the target is then a run.
      config_file: Configuration file argument, or "".
      keys: train.py's key=value arguments.
    """

    source: str
    source_kind: str
    target: Path
    target_kind: str
    grow: bool
    config_file: str
    keys: dict[str, str]

    @property
    def arguments(self) -> list[str]:
        """Arguments for config.loading.load."""
        named = [self.config_file] if self.config_file else []
        return [*named, *(f"{name}={text}" for name, text in self.keys.items())]


def parse_arguments(arguments: Sequence[str]) -> ConvertArgs:
    """Parses the command line of a conversion.

    Raises ConfigurationError with all its problems.
    """
    parsed = read_options(ConvertOptions, arguments)
    options = parsed.options
    for operand in parsed.operands:
        if operand != GROW:
            fact = ("write", f"from={operand} or to={operand}, or {GROW}")
            issue = ConfigIssue(f"{operand}: no such option", ("command line",), (fact,))
            parsed.problems.append(issue)
    for file in parsed.config_files[1:]:
        parsed.problems.append(ConfigIssue(f"{file}: there is already {parsed.config_files[0]}"))
    parsed.check()
    kind, colon, path = options.from_.partition(":")
    if colon and kind in OTHER_PROGRAMS:
        source = path
    else:
        source = options.from_
        kind = "hf" if is_hf_checkpoint(options.from_) else "run"
    to_hf = options.to.startswith(HUGGING_FACE)
    request = ConvertArgs(
        **vars(options),
        source=source,
        source_kind=kind,
        target=local_path(options.to.removeprefix(HUGGING_FACE)),
        target_kind="hf" if to_hf else options.export or "run",
        grow=GROW in parsed.operands,
        config_file="".join(parsed.config_files),
        keys=dict(setting.split("=", 1) for setting in parsed.settings),
    )
    if request.grow:
        problems = list(_growth_problems(request))
        ends = ()
    else:
        problems = list(_conversion_problems(request))
        ends = (f"from {request.source_kind}", f"to {request.target_kind}")
    for name in parsed.given:
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
        if ALIASES.get(name, name) in _OF_TRAINING:
            yield (
                f"{name}={text} applies to the training that follows: pass it to train.py, with "
                "load_parameters_path set to the smaller run."
            )
    if not request.keys and not request.config_file:
        yield "grow: set the new size, for example slot_num=2140 or base_num_decoder_layers=24."
