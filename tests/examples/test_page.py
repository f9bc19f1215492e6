"""The tutorial on architectures: its code is that of the examples."""

import re

import yaml

from MaxText.config.loading import load
from MaxText.conformance.checks import CHECKS
from tests.house.sources import REPOSITORY

PAGE = (REPOSITORY / "docs" / "tutorials" / "add_an_architecture.md").read_text(encoding="utf-8")


def lines_of(text: str) -> str:
    """Without indentation and empty lines, which formatters of pages change."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_quoted_code_stands_in_the_examples():
    folder = REPOSITORY / "examples"
    examples = [path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()]
    quoted = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(quoted) >= 5
    for block in quoted:
        assert any(lines_of(block) in lines_of(text) for text in examples), block


def test_yaml_of_the_page_is_a_configuration(tmp_path):
    text = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"(?:^    +\w+:.*\n)+", text, re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        keys = yaml.safe_load(block)
        path = tmp_path / "page.yml"
        path.write_text(yaml.safe_dump({"base_config": "quickstart.yml"} | keys))
        load([str(path)], "train.py")


def test_the_table_has_each_check():
    assert re.findall(r"^\| ([\w ]+) \| ", PAGE, re.MULTILINE)[1:] == [one.name for one in CHECKS]
