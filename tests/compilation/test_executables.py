"""The file of a compiled step: nothing of it is run before its signature is verified."""

import pickle
import stat

import pytest

from MaxText.compilation import saved_step
from MaxText.errors import UserError
from tests.hostile.files import Touches

FACTS = {"run": {"devices": {"number": 4}}}


@pytest.fixture
def key(tmp_path, monkeypatch):
    """Where the key will lie."""
    file = tmp_path / "keys/mine"
    monkeypatch.setenv(saved_step.KEY_VARIABLE, str(file))
    return file


@pytest.fixture
def written(tmp_path, key):
    path = tmp_path / "out/step.bin"
    saved_step.write_signed(str(path), FACTS, b"machine code\nmore of it")
    return path


def test_what_was_written_is_read(written, key, tmp_path):
    assert saved_step.read_signed(str(written)) == (FACTS, b"machine code\nmore of it")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert [file.name for file in written.parent.iterdir()] == ["step.bin"]
    before = key.read_bytes()
    saved_step.write_signed(str(tmp_path / "other"), FACTS, b"")
    assert key.read_bytes() == before  # made once


def test_no_byte_can_be_changed(written):
    content = written.read_bytes()
    changes = [content[:-1], content + b"\0", b"", content[:30]]
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        changes.append(bytes(changed))
    for changed in changes:
        written.write_bytes(changed)
        with pytest.raises(UserError, match="rejected"):
            saved_step.read_signed(str(written))


def test_a_hostile_pickle_is_not_unpickled(written, tmp_path, monkeypatch):
    proof = tmp_path / "proof"
    hostile = pickle.dumps(Touches(proof))
    first, signature, facts = written.read_bytes().split(b"\n")[:3]
    kept = [
        hostile,  # as other programs write it
        b"\n".join([first, signature, facts, hostile]),  # in place of what was signed
    ]
    with monkeypatch.context() as attacker:
        attacker.setenv(saved_step.KEY_VARIABLE, str(tmp_path / "attackers"))
        saved_step.write_signed(str(tmp_path / "foreign"), FACTS, hostile)
    kept.append((tmp_path / "foreign").read_bytes())  # signed, by another key
    for content in kept:
        written.write_bytes(content)
        with pytest.raises(UserError, match="rejected"):
            saved_step.read_signed(str(written))
    assert not proof.exists()
    pickle.loads(hostile)
    assert proof.exists()  # it was a danger


def test_keys_that_are_refused(written, key):
    key.chmod(0o640)  # others can read it
    with pytest.raises(UserError, match="chmod 600"):
        saved_step.read_signed(str(written))
    key.write_text("secret")
    key.chmod(0o600)
    with pytest.raises(UserError, match="32"):
        saved_step.read_signed(str(written))
    key.unlink()
    with pytest.raises(UserError, match=saved_step.KEY_VARIABLE):
        saved_step.read_signed(str(written))
    assert not key.exists()


def test_files_that_cannot_be_read_or_written(written, tmp_path):
    with pytest.raises(UserError, match=r"nothing.*(?s:.*)train_compile\.py"):
        saved_step.read_signed(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="below/a/file"):
        saved_step.write_signed(f"{written}/below/a/file", FACTS, b"")
