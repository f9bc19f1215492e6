"""Files behind symbolic links, and names with characters of patterns, lists and braces."""

import os
from pathlib import Path

import pytest

from MaxText.storage import file_access
from tests.refusals import refused


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def link(root: Path, name: str, target: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).symlink_to(target)


def listed(root: Path, pattern: str = "") -> list[str]:
    location = f"{root}/{pattern}" if pattern else str(root)
    files = file_access.list_files(location, "dataset_path")
    return [os.path.relpath(file.path, root) for file in files]


@pytest.fixture
def linked(tmp_path):
    """A file, a linked file, and a linked folder outside of the searched one."""
    root = tmp_path / "root"
    write(root, "a.jsonl")
    write(tmp_path, "store/blob", "elsewhere/c.jsonl", "elsewhere/deep/d.jsonl")
    link(root, "b.jsonl", "../store/blob")
    link(root, "sub", "../elsewhere")
    return root


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", ["a.jsonl", "b.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl"]),
        ("*", ["a.jsonl", "b.jsonl"]),
        ("b*", ["b.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl"]),
        ("**", ["a.jsonl", "b.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl"]),
        ("s*/*.jsonl", ["sub/c.jsonl"]),
        ("*/**/d.*", ["sub/deep/d.jsonl"]),
        ("sub", ["sub/c.jsonl", "sub/deep/d.jsonl"]),
        ("{b,a}.jsonl", ["b.jsonl", "a.jsonl"]),
        ("sub/{c,deep/d}.jsonl", ["sub/c.jsonl", "sub/deep/d.jsonl"]),
    ],
)
def test_links_count_as_what_they_point_to(linked, pattern, expected):
    assert listed(linked, pattern) == expected
    sizes = {file.path: file.size for file in file_access.list_files(str(linked), "k")}
    assert sizes[f"{linked}/b.jsonl"] == len("store/blob")
    assert [Path(file.path).name for file in file_access.files_in(str(linked))].count("b.jsonl")


def test_the_tag_of_a_link_is_that_of_its_target(linked):
    blob = linked.parent / "store" / "blob"
    os.utime(blob, (1, 1))
    (by_name,) = file_access.list_files(f"{linked}/b.jsonl", "k")
    (by_pattern,) = file_access.list_files(f"{linked}/b*", "k")
    assert by_name == by_pattern == file_access.file_info(f"{linked}/b.jsonl")
    assert by_name.tag == "1.0"


@pytest.mark.parametrize("target", ["..", ".", "../..", "/", "../../root", "self"])
@pytest.mark.parametrize("pattern", ["", "**/*.txt", "*/*.txt", "**/**/*.txt"])
def test_loops_and_links_to_folders_above_end(tmp_path, target, pattern):
    root = tmp_path / "root"
    write(root, "x/a.txt")
    link(root, "x/self", target)
    files = [name for name in listed(root, pattern) if name != "x/self"]
    assert files == ["x/a.txt"]


def test_many_links_to_each_other_are_searched_once(tmp_path):
    for number in range(12):
        write(tmp_path, f"{number}/{number}.txt")
        for other in range(12):
            link(tmp_path, f"{number}/to{other}", f"../{other}")
    expected = [f"{number}/{number}.txt" for number in range(12)]
    for pattern in ("", "**/*.txt", "*/*.txt"):
        assert listed(tmp_path, pattern) == expected
    assert len(listed(tmp_path, "*/to*/to*/to*/to*/to*/*.txt")) == 12


def test_a_hidden_folder_is_read_through_a_visible_link(tmp_path):
    write(tmp_path, ".store/a.txt", ".git/x")
    link(tmp_path, "data", ".store")
    assert listed(tmp_path) == ["data/a.txt"]


def test_links_that_lead_nowhere_are_listed(tmp_path):
    write(tmp_path, "a.txt")
    link(tmp_path, "b.txt", "nowhere")
    link(tmp_path, "c.txt", "c.txt")
    for pattern in ("", "*.txt"):
        assert listed(tmp_path, pattern) == ["a.txt", "b.txt", "c.txt"]
    assert file_access.list_files(str(tmp_path), "k")[1] == (f"{tmp_path}/b.txt", 0, "")


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    write(tmp_path, "a.txt", "deep/er/b.txt")
    scan = os.scandir

    def denied(path):
        if str(path).endswith("er"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    for pattern in ("", "**/*.txt"):
        refused("Permission denied", listed, tmp_path, pattern)


STRANGE = [
    "v[1]",
    "a,b",
    "{x,y}",
    "back\\slash",
    "sp ace",
    "ü漢",
    "50%",
    "#1",
    "a;b",
    "-x",
    "q?",
    "*",
]


@pytest.mark.parametrize("name", STRANGE)
def test_any_character_in_a_folder_and_in_a_file(tmp_path, name):
    root = tmp_path / name
    write(root, f"{name}.txt", "deep/other.txt")
    assert listed(root) == ["deep/other.txt", f"{name}.txt"] or listed(root) == [
        f"{name}.txt",
        "deep/other.txt",
    ]
    assert listed(root, f"{name}.txt") == [f"{name}.txt"]
    assert listed(root, "**/*.txt") == listed(root)
    assert listed(root, "*/*.txt") == ["deep/other.txt"]
    assert listed(root, "{deep/other,deep/other}.txt") == [
        "deep/other.txt",
        "deep/other.txt",
    ]
    for separator in ",;":
        for entry in (f"{root}", f"{root}/*.txt", f"{root}/{name}.txt", f"{root}/**/[o]*"):
            text = separator.join([entry, str(tmp_path), entry])
            assert file_access.split_list(text, separator) == [entry, str(tmp_path), entry]


def test_lists_of_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a", "b", "a,b", "c/x,y/1.txt", " led", "@list")
    for text, expected in (
        ("a,c", ["a", "c"]),
        ("b,a", ["b", "a"]),
        ("a,b", ["a,b"]),
        ("a, b", ["a", "b"]),
        ("b,a,b", ["b", "a,b"]),
        ("c/x,y/*.txt,b", ["c/x,y/*.txt", "b"]),
        ("c/{x,y},a", ["c/{x,y}", "a"]),
        ("d[,]*,,a", ["d[,]*", "a"]),
        ("gs://x/a,b", ["gs://x/a", "b"]),
        (" led", [" led"]),
        (" , ", []),
    ):
        assert file_access.split_list(text, ",") == expected
    assert listed(tmp_path, "@list") == ["@list"]
    assert file_access.list_files("@list", "k")[0].size == len("@list")


@pytest.mark.parametrize("pattern", ["{0..999999999999}", "{0..2000}{0..2000}", "{0..1048576}.txt"])
def test_braces_for_too_many_names(tmp_path, pattern):
    refused("more than 1,048,576 names", listed, tmp_path, pattern)


def test_links_to_files_of_the_same_list(tmp_path):
    write(tmp_path, "b.txt", "c.txt")
    link(tmp_path, "a.txt", "b.txt")
    link(tmp_path, "d.txt", "b.txt")
    link(tmp_path, "e.txt", "../outside")
    link(tmp_path, "f.txt", "../outside")
    files = file_access.list_files(str(tmp_path), "k")
    different = file_access.without_repeated_links(files)
    assert [Path(file.path).name for file in different] == ["b.txt", "c.txt", "e.txt"]
    twice = file_access.list_files(f"{tmp_path}/{{b,b}}.txt", "k")
    assert file_access.without_repeated_links(twice) == twice
