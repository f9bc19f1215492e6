"""Random command lines of programs that read weights and data sets: work that is done, or a message
and exit code 2. Never a traceback, never anything left behind."""

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from MaxText.config.schema import all_keys
from MaxText.config.values import to_yaml
from tests.house.sources import run_main
from tests.inference.small_models import llama_folder
from tests.input_pipeline import small_data

_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # what fails is short enough
)


class _Reached(Exception):
    """The command line was accepted, and the work itself would begin."""


# Where the work itself begins, for which a command line is accepted.
_WORK = (
    "inference.decoding.load_model",
    "evaluation.evaluate.load_model",
    "input_pipeline.inspect_dataset.Inspection.show_statistics",
    "input_pipeline.inspect_dataset.Inspection.show_batch",
)


def run(program: str, arguments: list[str]) -> int:
    """Exit code of a program; fails where there is a mistake without message."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.ExitStack() as patches:
        for name in _WORK:
            patches.enter_context(mock.patch(f"MaxText.{name}", side_effect=_Reached))
        patches.enter_context(contextlib.redirect_stdout(out))
        patches.enter_context(contextlib.redirect_stderr(err))
        try:
            code = run_main(program, arguments)
        except _Reached:
            code = 0
    assert code in (0, 2), (code, err.getvalue())
    assert code == 0 or err.getvalue().split("error: ", 1)[1].strip(), err.getvalue()
    return code


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory) -> Iterator[Path]:
    """A Hugging Face checkpoint, a run and a data set, and some that are broken."""
    folder = tmp_path_factory.mktemp("above") / "place"  # ".." is read as a data set, too
    llama_folder(folder / "hf")
    before = Path.cwd()
    os.chdir(folder)
    assert run("convert.py", ["from=hf:hf", "to=run"]) == 0
    small_data.write_data_set(folder / "data", {"train": [np.arange(40), np.arange(7)]})
    for name, content in {
        "cut": b'{"model_type": "lla',
        "deep": b"[" * 100_000,
        "list": b"[]",
        "empty": b"",
        "latin": b'{"model_type": "\xff"}',
        "nul": b"\0\0",
        "huge": b'{"vocab_size": 9' + b"9" * 5000,
        "other": b'{"model_type": "other"}',
        "sizes": b'{"model_type": "llama", "vocab_size": -1}',
        "words": b'{"model_type": "llama", "hidden_size": "many"}',
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes(content)
    (folder / "file.txt").write_text("text\n")
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "bad.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    (folder / "own.yml").write_text("decoder_block: llama2\n")
    (folder / "bad.yml").write_text("{")
    shutil.copytree(folder / "run", folder / "damaged")
    for path in (folder / "damaged" / "checkpoints" / "0" / "items" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:20])
    shutil.copytree(folder / "run", folder / "undescribed")
    (folder / "undescribed/checkpoints/0/metadata/metadata").write_bytes(b"[" * 100_000)
    yield folder
    os.chdir(before)


_EDGES = st.sampled_from(
    [
        "",
        " ",
        ".",
        "..",
        "/",
        "~",
        "~no_such_user_here",
        "nowhere",
        "nowhere/a",
        "a/b/c",
        "file.txt",
        "file.txt/a",
        "run",
        "run/",
        "run/checkpoints",
        "run/checkpoints/0",
        "run/checkpoints/0/items",
        "run/checkpoints/1",
        "hf",
        "damaged",
        "undescribed",
        "data",
        "own.yml",
        "rows.jsonl",
        "a" * 300,
        "a\nb",
        "é",
        "\udcff",
        "-",
        "--",
        "0",
        "-1",
        "1",
        "3",
        "9" * 400,
        "1e400",
        "nan",
        "true",
        "null",
        "[",
        "[]",
        "{a: b}",
        "=",
        "file:///x",
        "cut",
        "deep",
        "list",
        "empty",
        "latin",
        "nul",
        "huge",
        "other",
        "sizes",
        "words",
        "bad.jsonl",
        "/proc/self/x",
        "5GB",
        "0B",
        "1.5KB",
    ]
)
_PREFIXES = st.sampled_from(["hf:", "maxtext:", "fattorib:", "hf:hf:"])
_PLACES = st.one_of(_EDGES, st.tuples(_PREFIXES, _EDGES).map("".join))
_VALUES = st.one_of(
    _EDGES,
    st.sampled_from(["float32", "bfloat16", "float64", "llama", "gpt2", "stablehlo", "weights"]),
    st.integers(-2, 40).map(str),
    st.text(st.characters(exclude_characters="\0/~"), max_size=6),
)


def _edits(names: list[str], values: st.SearchStrategy[str] = _VALUES) -> st.SearchStrategy[str]:
    return st.builds("{}={}".format, st.sampled_from(names), values)


_KEY_EDITS = st.one_of(
    _edits(sorted(all_keys())),
    st.sampled_from([f"{key.name}={to_yaml(key.default)}" for key in all_keys().values()]),
)


def _typed(often: list, more: st.SearchStrategy[str], most: int) -> st.SearchStrategy[list[str]]:
    """Each of `often` in nine of ten lines, and up to `most` of what may be typed besides."""

    @st.composite
    def line(draw: st.DrawFn) -> list[str]:
        words = [draw(each) for each in often if draw(st.integers(0, 9))]
        return draw(st.permutations([*words, *draw(st.lists(more, max_size=most))]))

    return line()


_SOURCES = st.one_of(st.sampled_from(["hf:hf", "run", "hf:hf", "damaged", "maxtext:run"]), _PLACES)
_TARGETS = st.one_of(st.sampled_from(["out/a", "hf:out/a", "out/a", "hf:out/b"]), _PLACES)
_CONVERSIONS = st.one_of(
    _edits(
        [
            "export",
            "family",
            "dtype",
            "max_shard_size",
            "query_scaling",
            "length",
            "tokenizer",
            "form",
        ]
    ),
    _KEY_EDITS,
    st.sampled_from(
        [
            "grow",
            "own.yml",
            "bad.yml",
            "nowhere.yml",
            "--help",
            "-h",
            "--verfy",
            "--verify",
            "slot_num=8",
            "base_num_decoder_layers=4",
            "export=stablehlo",
            "dtype=bfloat16",
            "max_shard_size=1KB",
        ]
    ),
    _EDGES,
)
_WEIGHTS = _edits(
    ["load_parameters_path"],
    st.sampled_from(["run", "hf:hf", "run/checkpoints/0", "damaged", "undescribed"]) | _PLACES,
)
_TASKS = st.sampled_from(["[lambada]", "[wikitext]", "[lambada,nothing]"])
_DECODING = [
    "prompt",
    "prompt_file",
    "decode_output_path",
    "max_new_tokens",
    "tokenizer_path",
    "decode_stop_strings",
    "decode_num_return_sequences",
    "per_device_batch_size",
]
_EVALUATION = [
    "eval_tasks",
    "task_files.lambada",
    "task_files.wikitext",
    "eval_output",
    "eval_stride",
    "harness.tasks",
    "tokenizer_path",
    "dataset_path",
    "grain_eval_files",
]
_INSPECTION = ["step", "num_devices", "sample", "max_target_length"]
# All files below "/" would be looked at, which takes minutes.
_DATA = [st.sampled_from(["data", "dataset_path=data"]) | _EDGES.filter(lambda word: word != "/")]
_DATA += [st.just("vocab_size=512"), st.just("max_target_length=16")]
# What is typed, and how many lines by default and in the slow suite.
_COMMAND_LINES = {
    "convert.py": (
        _typed([_edits(["from"], _SOURCES), _edits(["to"], _TARGETS)], _CONVERSIONS, 2),
        40,
        200,
    ),
    "decode.py": (_typed([_WEIGHTS], _edits(_DECODING) | _KEY_EDITS | _EDGES, 3), 20, 60),
    "eval.py": (
        _typed([_WEIGHTS], _edits(_EVALUATION, _VALUES | _TASKS) | _KEY_EDITS | _EDGES, 3),
        20,
        60,
    ),
    "inspect_data.py": (_typed(_DATA, _edits(_INSPECTION) | _KEY_EDITS, 2), 30, 90),
}


@pytest.mark.parametrize("name", _COMMAND_LINES)
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_done_or_refused(place, name, many):
    command_lines, few, number = _COMMAND_LINES[name]

    @given(command_lines)
    @settings(_SETTINGS, max_examples=number if many else few)
    def is_done_or_refused(arguments):
        before = set(place.rglob("*"))
        code = run(name, arguments)
        written = sorted(set(place.rglob("*")) - before, reverse=True)
        assert code == 0 or not written
        for path in written:
            path.rmdir() if path.is_dir() else path.unlink()

    is_done_or_refused()
