"""The file of a compiled step: nothing of it is run before its signature is verified."""

import os
import pickle
import stat

import pytest

from MaxText.compilation import executables
from MaxText.errors import UserError

FACTS = {"run": {"devices": {"number": 4}}}


@pytest.fixture
def key(tmp_path, monkeypatch):
    """Where the key will lie."""
    file = tmp_path / "keys/mine"
    monkeypatch.setenv(executables.KEY_VARIABLE, str(file))
    return file


@pytest.fixture
def written(tmp_path, key):
    path = tmp_path / "out/step.bin"
    executables.write(str(path), FACTS, b"machine code\nmore of it")
    return path


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_what_was_written_is_read(written, key):
    assert executables.read(str(written)) == (FACTS, b"machine code\nmore of it")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert [file.name for file in written.parent.iterdir()] == ["step.bin"]


def test_the_key_is_made_once(written, key, tmp_path):
    before = key.read_bytes()
    executables.write(str(tmp_path / "other"), FACTS, b"")
    assert key.read_bytes() == before


def test_no_byte_can_be_changed(written):
    content = written.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        written.write_bytes(changed)
        with pytest.raises(UserError, match="is refused"):
            executables.read(str(written))
    for changed in (content[:-1], content + b"\0", b"", content[:30]):
        written.write_bytes(changed)
        with pytest.raises(UserError, match="is refused"):
            executables.read(str(written))


def test_a_hostile_pickle_is_not_unpickled(written, tmp_path, monkeypatch):
    proof = tmp_path / "proof"
    hostile = pickle.dumps(Hostile(proof))
    first, signature, facts = written.read_bytes().split(b"\n")[:3]
    kept = [
        hostile,  # as other programs write it
        b"\n".join([first, signature, facts, hostile]),  # in place of what was signed
    ]
    with monkeypatch.context() as attacker:
        attacker.setenv(executables.KEY_VARIABLE, str(tmp_path / "attackers"))
        executables.write(str(tmp_path / "theirs"), FACTS, hostile)
    kept.append((tmp_path / "theirs").read_bytes())  # signed, by another key
    for content in kept:
        written.write_bytes(content)
        with pytest.raises(UserError, match="nothing of it was run"):
            executables.read(str(written))
    assert not proof.exists()
    pickle.loads(hostile)
    assert proof.exists()  # it was a danger


def test_a_key_that_others_can_read_is_refused(written, key):
    key.chmod(0o640)
    with pytest.raises(UserError, match="chmod 600"):
        executables.read(str(written))


def test_a_short_key_is_refused(written, key):
    key.write_text("secret")
    with pytest.raises(UserError, match="shorter than 32"):
        executables.read(str(written))


def test_without_a_key_nothing_is_taken_and_none_is_made(written, key):
    key.unlink()
    with pytest.raises(UserError, match=r"(?s)copy that file.*MAXTEXT_SIGNING_KEY_FILE"):
        executables.read(str(written))
    assert not key.exists()


def test_a_file_that_is_not_there(key, tmp_path):
    with pytest.raises(UserError, match=r"(?s)no such file.*train_compile.py"):
        executables.read(str(tmp_path / "nothing"))


def test_a_place_that_cannot_be_written(written, tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        executables.write(f"{written}/below/a/file", FACTS, b"")
