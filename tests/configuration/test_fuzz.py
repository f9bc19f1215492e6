"""Whatever is written on a command line, in a file or in the environment: a configuration that
works, or a message and exit code 2. Never a traceback, never a hang.

The examples are the same in every run. What was found once stands by name at the end.
"""

import contextlib
import functools
import io
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from MaxText.configuration import command_line, config_files, saved
from MaxText.configuration.catalogue import all_keys
from MaxText.configuration.loading import Loaded, load
from MaxText.configuration.maxtext_keys import ALIASES, TRANSLATIONS, UNAVAILABLE
from MaxText.configuration.problems import ConfigurationError
from MaxText.configuration.values import to_yaml

# Threads that other tests have left (gcsfs waits for random times) may draw from `random`
# meanwhile, which hypothesis takes for the strategies' doing.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

# 1,000 examples: 400 on the command line, 200 and 150 of files, 125 each of the environment and of
# words that are no edits.
_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)

_EDGES = (
    "0", "-0", "-1", "1", "2", "3", "7", "64", "0.0", "-0.0", "0.5", "1e-30", "1e30", "1e308",
    "1e400", "-1e400", "nan", ".nan", "inf", "-.inf", "9" * 30, "-" + "9" * 30, "9" * 400,
    "9" * 5000, "1_000", "_1", "1_", "0x1F", "0b1", "0o17", "007", "1:30", "½", "٣", "²",
    "2147483648", "9223372036854775807", "9223372036854775808", "18446744073709551616",
    "true", "False", "yes", "off", "null", "none", "~", "", " ", "\t", "\n", "\x00", "\x7f",
    "\ufeff", "\u2028", "\ud800", "🙂", "é", "a" * 10_000, "'", '"', "''", '""', "'3'", '"true"',
    "[", "]", "{", "}", "[]", "{}", "[[]]", "[[[[[[]]]]]]", "[" * 3000, "[1,2", "[,]", "[a,b]",
    "[1]", "[[1]]", "[[a,1]]", "[[a,-1]]", "[[a,nan]]", "[[0,1]]", "[[0,0]]", "[[[global],1]]",
    "[[[global],999999999999]]", "[[[],1]]", "[true]", "[null]", "[~, 1]", "[1.5]", "[99999999999]",
    "{a: 1}", "{a: {b: c}}", "[{a: 1}]", "? a", "a: b", "- a", "&a [*a]", "*a", "&a", "!!python/x",
    "!!int 3", "!!binary YQ==", "!tag a", "# a", "%", "%YAML 9.9", "---", "...", "|", ">", "@a",
    "`", "../..", "/", "//", ".", "~", "~nobody", "a/../b", "gs://", "s3://a", "hf:", "file:///x",
    "a\x00b", "(", "(?P<a", "a{99999999999}", "[[(,1]]", "$(id)", "`id`", "{0}", "%s", "=", "==",
    "2024-01-01", "<<", "a=b", "--steps", "-", "--",
)  # fmt: skip


# Lists and mappings of anything, to a depth beyond what any key needs.
_NESTED: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 70),
        st.floats(),
        st.sampled_from(["global", "local", "q", "gelu", "data", "embed", "tensor", ""]),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=8,
)
_WRONG = st.one_of(
    st.sampled_from(_EDGES),
    st.sampled_from([to_yaml(key.default) for key in all_keys().values()]),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(max_size=20),
    _NESTED.map(to_yaml),
)
_NAMES = sorted(all_keys())
_FOREIGN = sorted({*ALIASES, *UNAVAILABLE, *(name for name, _ in TRANSLATIONS)})
_SPECIAL = ["base_config", "schema_version", "sweep", "stages", "<<", "", "?", "=", "null"]


@functools.cache
def _right(name: str) -> st.SearchStrategy[str]:
    """Values of a key that are right or nearly right."""
    key = all_keys()[name]
    choices = [str(choice) for choice in key.choices]
    lists = [f"[{choice}]" for choice in choices] + [f"[[[{choice}],2]]" for choice in choices]
    bounds = [str(bound + step) for _, bound in key.bounds for step in (-1, 0, 1)]
    known = st.sampled_from([to_yaml(key.default), *bounds, *choices, *lists])
    if key.annotation is bool:
        return st.sampled_from(["true", "false"])
    if key.annotation is int:
        return st.one_of(known, st.integers(-1, 40).map(str), st.integers(0, 70).map(_power))
    if key.annotation is float:
        return st.one_of(known, st.floats(0, 2).map(repr))
    return known


def _power(exponent: int) -> str:
    return str(2**exponent)


def _misspelt(name: str, at: int, how: int) -> str:
    at %= len(name)
    ways = (
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
    )
    return ways[how % len(ways)]


class Edit(NamedTuple):
    """One `name=text`."""

    name: str
    text: str


_MISSPELT = st.builds(_misspelt, st.sampled_from(_NAMES), st.integers(0, 20), st.integers(0, 9))
_ANY_NAME = st.one_of(st.sampled_from(_NAMES), st.sampled_from([*_FOREIGN, *_SPECIAL]), _MISSPELT)


@st.composite
def _edits(draw: st.DrawFn) -> list[Edit]:
    """Mostly right values of our keys, so that many configurations are accepted."""
    edits = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.integers(0, 3)):
            name = draw(st.sampled_from(_NAMES))
            edits.append(Edit(name, draw(_right(name))))
        else:
            edits.append(Edit(draw(_ANY_NAME), draw(_WRONG)))
    return edits


_PROGRAMS = ["train.py", "decode.py", "eval.py", "prepare_data.py", "inspect_data.py", "compare.py"]


def accepted_or_refused(arguments: list[str], program: str = "train.py") -> Loaded | None:
    """What a program makes of a command line; None where it says what is wrong.

    Fails where anything but a message and exit code 2 comes out of a mistake.
    """
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8")
    written = io.StringIO()
    loaded, code = None, 0
    with contextlib.redirect_stderr(written), contextlib.redirect_stdout(printed):
        try:
            loaded = command_line.parse(program, arguments, "usage")
        except SystemExit as stopped:
            code = stopped.code
    # 0 without configuration: --help, --show-config or --why was answered.
    assert code in (0, 2), code
    assert code == 0 or written.getvalue().split("error: ", 1)[1].strip(), written.getvalue()
    if loaded is not None:
        # What a run prints and writes about itself.
        assert saved.resolved_yaml(loaded.config).encode()
    return loaded


@given(
    _edits(),
    st.sampled_from(["", "base.yml", *config_files.shipped_names()]),
    st.sampled_from(["", *config_files.preset_names(config_files.MODELS)]),
    st.sampled_from(_PROGRAMS),
)
@settings(_SETTINGS, max_examples=400)
def test_command_lines(edits, base, preset, program):
    # Most files name a data set that decides nothing here.
    arguments = [*([base] if base else []), "dataset_type=synthetic"]
    arguments += [f"model_name={preset}"] if preset else []
    arguments += [f"{name}={text}" for name, text in edits]
    accepted_or_refused(arguments, program)


def _yaml_lines(edits: list[Edit]) -> str:
    return "\n".join(f"{name}: {text}" for name, text in edits) + "\n"


@given(
    st.lists(_edits(), min_size=1, max_size=2),
    st.sampled_from(["", "base_config: base.yml\n", "schema_version: 1\n"]),
    st.sampled_from(_PROGRAMS),
)
@settings(_SETTINGS, max_examples=200)
def test_files(edits, first_line, program):
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, some in enumerate(edits):
            path = Path(folder, f"{number}.yml")
            beneath = f"base_config: {paths[-1].name}\n" if paths else first_line
            text = beneath + _yaml_lines(some)
            path.write_bytes(text.encode(errors="replace"))
            paths.append(path)
        accepted_or_refused([str(paths[-1]), "dataset_type=synthetic"], program)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode), st.sampled_from(_EDGES))
@settings(_SETTINGS, max_examples=150)
def test_files_of_anything(content, edge):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "any.yml")
        path.write_bytes(edge.encode(errors="replace") + content)
        accepted_or_refused([str(path), "dataset_type=synthetic"])


@given(_edits())
@settings(_SETTINGS, max_examples=125)
def test_environment(edits):
    variables = {}
    for name, text in edits:
        variable = f"M_{name.upper()}"
        # The system itself refuses these.
        if "=" not in variable and "\0" not in variable + text and "\ud800" not in variable + text:
            variables[variable] = text
    with pytest.MonkeyPatch.context() as patch:
        for variable, text in variables.items():
            patch.setenv(variable, text)
        accepted_or_refused(["dataset_type=synthetic"])


_WORDS = st.one_of(
    st.sampled_from(["--help", "-h", "--show-config", "--why", "--from-maxtext", "--", "-", ""]),
    st.sampled_from(["base.yml", "nowhere.yml", "~nobody/a.yml", "a\0.yml", "a" * 5000 + ".yml"]),
    st.sampled_from(["/.yml", "\ud800.yml", "configs/.yml", "steps=1", "steps=2", "stages=[a]"]),
    st.sampled_from(_NAMES),
    st.text(max_size=8),
)


@given(st.lists(_WORDS, min_size=1, max_size=4), st.sampled_from(_PROGRAMS))
@settings(_SETTINGS, max_examples=125)
def test_words(words, program):
    accepted_or_refused(words, program)


# Sizes stay those of a tiny model; everything else about it may be edited.
_SIZES = {
    "global_parameter_scale", "base_emb_dim", "base_num_query_heads", "base_num_kv_heads",
    "base_mlp_dim", "base_num_decoder_layers", "head_dim", "vocab_size", "max_target_length",
    "model_name",
}  # fmt: skip
_OF_MODEL = [key.name for key in all_keys().values() if key.section[0] == "model"]
_PARTS = [name for name in _OF_MODEL if name not in _SIZES]
_TINY = (
    "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=8",
    "base_mlp_dim=24", "base_num_decoder_layers=2", "vocab_size=32", "max_target_length=16",
    "dataset_type=synthetic",
)  # fmt: skip


@st.composite
def _models(draw: st.DrawFn) -> list[str]:
    blocks = config_files.preset_names(config_files.DECODER_BLOCKS)
    names = draw(st.lists(st.sampled_from(_PARTS), min_size=1, max_size=4, unique=True))
    return [f"decoder_block={draw(st.sampled_from(blocks))}"] + [
        f"{name}={draw(_right(name))}" for name in names if name != "decoder_block"
    ]


def _builds(arguments: list[str]) -> bool:
    """Whether a tiny model was accepted; fails where an accepted one has no parameters."""
    from MaxText.layers.model import Model
    from MaxText.training import backend_defaults

    loaded = accepted_or_refused([*_TINY, *arguments])
    if loaded is None:
        return False
    section, _ = backend_defaults.resolve(loaded.config.model, "cpu")
    assert Model(section).num_parameters > 0
    return True


@given(_models())
@settings(_SETTINGS, max_examples=60)
def test_accepted_models_build(arguments):
    _builds(arguments)


@pytest.mark.slow
@given(_models())
@settings(_SETTINGS, max_examples=1000)
def test_many_accepted_models_build(arguments):
    _builds(arguments)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"steps={'9' * 400}", "is beyond integers of 64 bits"),
        ("steps=1e300", "is beyond integers of 64 bits"),
        (f"learning_rate={'9' * 400}", "is not a finite number"),
        (f"adamw_mask={'[' * 3000}", "is not a list"),
        ("adamw_mask=[[[[[[]]]]]]", "is not a list"),
        ("adamw_mask=&a [*a]", "is not a list"),
        ("base_num_decoder_layers=1000000000000", "is not >= 1 and <= 10000"),
        ("global_parameter_scale=4611686018427387904", "is not >= 1 and <= 1048576"),
        ("vocab_size=9223372036854775807", "is not >= 1 and <= 2147483647"),
        ("attention_types=[[[global],999999999999]]", "names 999999999999 layers"),
        (
            "enable_rampup_batch_size=true\nper_device_batch_size=1e308\n"
            "per_device_batch_size_start=1e-300\nper_device_batch_size_increment=1e-300",
            "does not make per_device_batch_size=1e[+]308",
        ),
        ("run_name=a\udcff", "is not UTF-8 text without NUL"),
        (f"{'a' * 5000}.yml", "cannot be looked for: File name too long"),
        ("~no_such_user_here/a.yml", "Could not determine home directory"),
    ],
)
def test_what_was_found(line, message):
    with pytest.raises(ConfigurationError, match=message):
        load([*line.split("\n"), "dataset_type=synthetic"], "train.py")


def test_nul_in_a_file(tmp_path):
    (tmp_path / "a.yml").write_text('run_name: "a\\0b"\n')
    with pytest.raises(ConfigurationError, match=r"run_name: .* is not UTF-8 text without NUL"):
        load([str(tmp_path / "a.yml"), "dataset_type=synthetic"], "train.py")
