"""Whatever is written on a command line, in a file or in the environment: a configuration that
works, or a message and exit code 2. Never a traceback, never a hang."""

import contextlib
import functools
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from MaxText.config import command_line, config_files, serialization
from MaxText.config.loading import LoadedConfig, load
from MaxText.config.maxtext_keys import ALIASES, TRANSLATIONS, UNSUPPORTED
from MaxText.config.schema import Config, all_keys
from MaxText.config.values import to_yaml
from tests.small_models import some_quick

# Threads that other tests have left (gcsfs waits for random times) may draw from `random`
# meanwhile, which hypothesis takes for the strategies' doing.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


def _settings(number: int) -> settings:
    return settings(
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        max_examples=number,
        derandomize=True,
    )


_EDGES = (
    "0",
    "-0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "64",
    "0.0",
    "-0.0",
    "0.5",
    "1e-30",
    "1e30",
    "1e308",
    "1e400",
    "-1e400",
    "nan",
    ".nan",
    "inf",
    "-.inf",
    "9" * 30,
    "-" + "9" * 30,
    "9" * 400,
    "9" * 5000,
    "1_000",
    "_1",
    "1_",
    "0x1F",
    "0b1",
    "0o17",
    "007",
    "1:30",
    "½",
    "٣",
    "²",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "true",
    "False",
    "yes",
    "off",
    "null",
    "none",
    "~",
    "",
    " ",
    "\t",
    "\n",
    "\x00",
    "\x7f",
    "\ufeff",
    "\u2028",
    "\ud800",
    "🙂",
    "é",
    "a" * 10_000,
    "'",
    '"',
    "''",
    '""',
    "'3'",
    '"true"',
    "[",
    "]",
    "{",
    "}",
    "[]",
    "{}",
    "[[]]",
    "[[[[[[]]]]]]",
    "[" * 3000,
    "[1,2",
    "[,]",
    "[a,b]",
    "[1]",
    "[[1]]",
    "[[a,1]]",
    "[[a,-1]]",
    "[[a,nan]]",
    "[[0,1]]",
    "[[0,0]]",
    "[[[global],1]]",
    "[[[global],999999999999]]",
    "[[[],1]]",
    "[true]",
    "[null]",
    "[~, 1]",
    "[1.5]",
    "[99999999999]",
    "{a: 1}",
    "{a: {b: c}}",
    "[{a: 1}]",
    "? a",
    "a: b",
    "- a",
    "&a [*a]",
    "*a",
    "&a",
    "!!python/x",
    "!!int 3",
    "!!binary YQ==",
    "!tag a",
    "# a",
    "%",
    "%YAML 9.9",
    "---",
    "...",
    "|",
    ">",
    "@a",
    "`",
    "../..",
    "/",
    "//",
    ".",
    "~",
    "~unknown",
    "a/../b",
    "gs://",
    "s3://a",
    "hf:",
    "file:///x",
    "a\x00b",
    "(",
    "(?P<a",
    "a{99999999999}",
    "[[(,1]]",
    "$(id)",
    "`id`",
    "{0}",
    "%s",
    "=",
    "==",
    "2024-01-01",
    "<<",
    "a=b",
    "--steps",
    "-",
    "--",
)


# By categories: a table of the characters of a codec takes a second to make.
_CHARACTERS = st.characters(exclude_categories=["Cs"])
# Lists and mappings of anything, to a depth beyond what any key needs.
_NESTED: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 70),
        st.floats(),
        st.sampled_from(["global", "local", "q", "gelu", "data", "embed", "tensor", ""]),
        st.text(_CHARACTERS, max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(_CHARACTERS, max_size=4), inner, max_size=2),
    ),
    max_leaves=8,
)
_WRONG = st.one_of(
    st.sampled_from(_EDGES),
    st.sampled_from([to_yaml(key.default) for key in all_keys().values()]),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(_CHARACTERS, max_size=20),
    _NESTED.map(to_yaml),
)
_NAMES = sorted(all_keys())
_FOREIGN = sorted({*ALIASES, *UNSUPPORTED, *(name for name, _ in TRANSLATIONS)})
_SPECIAL = ["base_config", "schema_version", "sweep", "stages", "<<", "", "?", "=", "null"]


@functools.cache
def _right(name: str) -> st.SearchStrategy[str]:
    """Values of a key that are right or nearly right."""
    key = all_keys()[name]
    choices = [str(choice) for choice in key.choices]
    lists = [f"[{choice}]" for choice in choices] + [f"[[[{choice}],2]]" for choice in choices]
    bounds = [str(bound + step) for _, bound in key.bounds for step in (-1, 0, 1)]
    known = st.sampled_from([to_yaml(key.default), *bounds, *choices, *lists])
    others = {
        bool: st.sampled_from(["true", "false"]),
        int: st.integers(-1, 40).map(str) | st.integers(0, 70).map(lambda power: str(2**power)),
        float: st.floats(0, 2).map(repr),
    }
    return known | others.get(key.annotation, known)


def _misspelt(name: str, at: int) -> list[str]:
    at %= len(name)
    return [
        name[:at] + name[at + 1 :],
        name[:at] + "_" + name[at:],
        name[:at] + "é" + name[at:],
        name.upper(),
        name.replace("_", "-"),
        f"model.{name}",
        f"-{name}",
        f"--{name}",
        f"+{name}",
        name[::-1],
    ]


_MISSPELT = st.builds(_misspelt, st.sampled_from(_NAMES), st.integers(0, 20)).flatmap(
    st.sampled_from
)
_ANY_NAME = st.one_of(st.sampled_from(_NAMES), st.sampled_from([*_FOREIGN, *_SPECIAL]), _MISSPELT)


@st.composite
def _edits(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Mostly right values of our keys, so that many configurations are accepted."""
    edits = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.integers(0, 3)):
            name = draw(st.sampled_from(_NAMES))
            edits.append((name, draw(_right(name))))
        else:
            edits.append((draw(_ANY_NAME), draw(_WRONG)))
    return edits


class Input(NamedTuple):
    """What a program is given: files by name, environment variables and arguments."""

    arguments: list[str]
    files: dict[str, bytes]
    environment: dict[str, str]


@st.composite
def _command_lines(draw: st.DrawFn) -> Input:
    # Most files name a data set that decides nothing here.
    base = draw(st.sampled_from(["", "base.yml", *config_files.shipped_names()]))
    preset = draw(st.sampled_from(["", *config_files.preset_names(config_files.MODELS)]))
    arguments = [*([base] if base else []), "dataset_type=synthetic"]
    arguments += [f"model_name={preset}"] if preset else []
    arguments += [f"{name}={text}" for name, text in draw(_edits())]
    return Input(arguments, {}, {})


@st.composite
def _files(draw: st.DrawFn) -> Input:
    files: dict[str, bytes] = {}
    beneath = draw(st.sampled_from(["", "base_config: base.yml\n", "schema_version: 1\n"]))
    for edits in draw(st.lists(_edits(), min_size=1, max_size=2)):
        text = beneath + "\n".join(f"{name}: {text}" for name, text in edits) + "\n"
        name = f"{len(files)}.yml"
        files[name] = text.encode(errors="replace")
        beneath = f"base_config: {name}\n"
    return Input([list(files)[-1], "dataset_type=synthetic"], files, {})


@st.composite
def _files_of_anything(draw: st.DrawFn) -> Input:
    content = draw(st.binary(max_size=60) | st.text(_CHARACTERS, max_size=60).map(str.encode))
    edge = draw(st.sampled_from(_EDGES)).encode(errors="replace")
    return Input(["any.yml", "dataset_type=synthetic"], {"any.yml": edge + content}, {})


@st.composite
def _environments(draw: st.DrawFn) -> Input:
    variables = [(f"M_{name.upper()}", text) for name, text in draw(_edits())]
    # The system itself refuses others.
    passed = [pair for pair in variables if re.match("[^\0\ud800=]*=[^\0\ud800]*$", "=".join(pair))]
    return Input(["dataset_type=synthetic"], {}, dict(passed))


_WORDS = st.one_of(
    st.sampled_from(["--help", "-h", "--show-config", "--why", "--from-maxtext", "--", "-", ""]),
    st.sampled_from(["base.yml", "nowhere.yml", "~unknown/a.yml", "a\0.yml", "a" * 5000 + ".yml"]),
    st.sampled_from(["/.yml", "\ud800.yml", "configs/.yml", "steps=1", "steps=2", "stages=[a]"]),
    st.sampled_from(_NAMES),
    st.text(_CHARACTERS, max_size=8),
)
_INPUTS = st.one_of(
    _command_lines(),
    _command_lines(),
    _files(),
    _files_of_anything(),
    _environments(),
    st.lists(_WORDS, min_size=1, max_size=4).map(lambda words: Input(words, {}, {})),
)
_PROGRAMS = ["train.py", "decode.py", "eval.py", "prepare_data.py", "inspect_data.py", "compare.py"]


def read_again(loaded: LoadedConfig) -> Config:
    text = serialization.resolved_yaml(loaded.config)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "saved.yml").write_bytes(text.encode())
        again = load([f"{folder}/saved.yml"]).config
    assert serialization.resolved_yaml(again) == text
    return again


def accepted_or_refused(told: Input, program: str) -> LoadedConfig | None:
    """What a program makes of it; None where it says what is wrong, and exits with 2."""
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8")
    written = io.StringIO()
    loaded, code = None, 0
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, told.environment),
        contextlib.redirect_stderr(written),
        contextlib.redirect_stdout(printed),
    ):
        for name, content in told.files.items():
            Path(name).write_bytes(content)
        try:
            loaded = command_line.parse(program, told.arguments, "usage")
        except SystemExit as stopped:
            code = stopped.code
    # 0 without configuration: --help, --show-config or --why was answered.
    assert code in (0, 2), code
    assert code == 0 or written.getvalue().split("error: ", 1)[1].strip(), written.getvalue()
    if loaded is not None:
        # What a run prints and writes about itself can be read again.
        assert read_again(loaded) == loaded.config
    return loaded


@pytest.mark.parametrize("number", some_quick([40, 250], 2))
def test_inputs(number):
    @given(_INPUTS, st.sampled_from(_PROGRAMS))
    @_settings(number)
    def is_accepted_or_refused(told, program):
        accepted_or_refused(told, program)

    is_accepted_or_refused()


# Sizes stay those of a tiny model; everything else about it may be edited.
_SIZES = {
    "global_parameter_scale",
    "base_emb_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "base_mlp_dim",
    "base_num_decoder_layers",
    "mtp_num_layers",  # each is built on its own
    "head_dim",
    "vocab_size",
    "max_target_length",
    "model_name",
}
_OF_MODEL = [key.name for key in all_keys().values() if key.section[0] == "model"]
_PARTS = [name for name in _OF_MODEL if name not in {*_SIZES, "decoder_block"}]
_TINY = (
    "base_emb_dim=16",
    "base_num_query_heads=2",
    "base_num_kv_heads=1",
    "head_dim=8",
    "base_mlp_dim=24",
    "base_num_decoder_layers=2",
    "vocab_size=32",
    "max_target_length=16",
    "dataset_type=synthetic",
)


@st.composite
def _models(draw: st.DrawFn) -> list[str]:
    blocks = config_files.preset_names(config_files.DECODER_BLOCKS)
    names = draw(st.lists(st.sampled_from(_PARTS), min_size=1, max_size=4, unique=True))
    block = f"decoder_block={draw(st.sampled_from(blocks))}"
    return [*_TINY, block, *(f"{name}={draw(_right(name))}" for name in names)]


@pytest.mark.parametrize("number", some_quick([25, 150], 2))
def test_accepted_models_build(number):
    from MaxText.layers.assembly.model import Model
    from MaxText.training import backend_defaults

    @given(_models())
    @_settings(number)
    def builds(arguments):
        if loaded := accepted_or_refused(Input(arguments, {}, {}), "train.py"):
            section, _ = backend_defaults.resolve_auto(loaded.config.model, "cpu")
            assert Model(section).num_parameters > 0

    builds()
