"""docs/add_an_architecture.md: the code of its new part, applied to a copy of the repository."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.house.sources import REPOSITORY

PAGE = REPOSITORY / "docs" / "add_an_architecture.md"
COPIED = ("MaxText", "configs", "tests", "pyproject.toml")


def code_after(title: str) -> list[str]:
    """The indented blocks of the numbered step `title` of part B."""
    page = PAGE.read_text(encoding="utf-8").partition("\n## B.")[2]
    step = page.partition(f" {title}")[2].partition("\n**")[0]
    blocks, block = [], []
    for line in [*step.splitlines()[1:], "end"]:
        if line.startswith("    ") or (block and not line):
            block.append(line)
        elif block:
            blocks.append(textwrap.dedent("\n".join(block)).strip("\n") + "\n")
            block = []
    return blocks


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new), encoding="utf-8")


def insert(path: Path, before: str, code: str) -> None:
    replace(path, before, code + before)


def apply_page(copy: Path) -> None:
    """Does what the steps 1 to 4 and 7 say."""
    package = copy / "MaxText"
    keys, condition = code_after("Keys**")
    replace(
        package / "configuration" / "model_sections.py",
        'only_if={"feed_forward_type": ["mlp"]},\n',
        condition,
    )
    sections = package / "configuration" / "layer_sections.py"
    text = sections.read_text(encoding="utf-8")
    start = text.index("    feed_forward_type:")
    end = text.index("    mlp_activations:", start)
    keys = keys[keys.index("    feed_forward_type:") :]
    sections.write_text(text[:start] + keys + text[end:], encoding="utf-8")

    (part,) = code_after("The part**")
    (package / "layers" / "low_rank_gated.py").write_text(part, encoding="utf-8")
    imported, chosen = code_after("The place where it is chosen**")
    block = package / "layers" / "block.py"
    insert(block, "from MaxText.layers.mixture_of_experts", imported)
    insert(block, "    return MLP(own, building, rngs)\n", textwrap.indent(chosen, "    "))
    (rule,) = code_after("Logical axes.**")
    insert(
        package / "configuration" / "training_sections.py",
        '    ("activation_batch", ("data", "fsdp", "fsdp_transpose", "expert")),\n',
        textwrap.indent(rule, "    "),
    )
    (test,) = code_after("A test of the formula**")
    (copy / "tests" / "layers" / "test_low_rank_gated.py").write_text(test, encoding="utf-8")


@pytest.mark.slow
def test_the_new_part_of_the_page_trains(tmp_path, users_environment):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "golden")
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copyfile(source, copy / name)
    apply_page(copy)

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=copy, env=users_environment, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run("-m", "pytest", "-q", "tests/layers/test_low_rank_gated.py")
    shown = run(
        "MaxText/train.py", "dataset_type=synthetic", "hardware=cpu", "steps=3", "run_name=page",
        "decoder_block=llama2", "feed_forward_type=low_rank_gated", "gate_rank=4",
        "base_emb_dim=32", "base_num_query_heads=2", "base_num_kv_heads=2", "head_dim=16",
        "base_num_decoder_layers=2", "vocab_size=64", "max_target_length=16",
        "per_device_batch_size=2", "enable_checkpointing=false",
    )  # fmt: skip
    assert "gate_down" in (copy / "maxtext_output" / "page" / "start.txt").read_text("utf-8")
    assert "completed step: 2" in shown
