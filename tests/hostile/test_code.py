"""Files that are programs where they are loaded carelessly: none of them is run."""

import itertools
import json
import pickle
import tarfile

import numpy as np
import pytest

from MaxText.config.loading import load, load_config
from MaxText.config.problems import ConfigurationError
from MaxText.conversion.hf_checkpoint import TensorFiles
from MaxText.conversion.hf_import import FattoribCheckpoint
from MaxText.input_pipeline.document_sources.records import read_ids
from MaxText.input_pipeline.formats.torch_tensors import TorchFileError, read_tensor
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from tests.hostile.files import Touches, npy, tar_archive, torch_archive
from tests.input_pipeline.document_sources.written_corpora import read_documents, read_texts
from tests.refusals import refused


@pytest.fixture
def marker(tmp_path):
    """What a program in a file would make; it must not be there afterwards."""
    path = tmp_path / "was_run"
    yield path
    assert not path.exists()


def test_the_program_in_the_file_works(tmp_path):
    pickle.loads(pickle.dumps(Touches(tmp_path / "was_run")))
    assert (tmp_path / "was_run").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_in_archives_of_tokens(tmp_path, marker, protocol):
    pickled = pickle.dumps(Touches(marker), protocol)
    for content in (torch_archive(pickled), pickled):
        (tmp_path / "a.tar").write_bytes(tar_archive({"0.input_id.pth": content}))
        (record,) = read_ids(str(tmp_path / "a.tar"), "webdataset")
        assert "mkdir" in record.reason or "torch.save" in record.reason


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(S'exit 1'\ntR.",
        b"(S'exit 1'\nios\nsystem\n.",
        b"(cos\nsystem\nS'exit 1'\no.",
        b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01a\x85R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2.__globals__\n.",
        b"\x80\x02ctorch\nload\nX\x01\x00\x00\x00a\x85R.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_other_names_in_pickles(program):
    with pytest.raises(TorchFileError):
        read_tensor(torch_archive(program))


def test_arrays_of_objects(tmp_path, marker):
    content = npy(np.array([Touches(marker)], object))
    (tmp_path / "a.tar").write_bytes(tar_archive({"0.input_id.npy": content}))
    (record,) = read_ids(str(tmp_path / "a.tar"), "webdataset")
    assert "Object arrays" in record.reason


@pytest.mark.parametrize(
    ("read", "names"),
    [
        (read_texts, ["corpus.pkl", "corpus.pth", "corpus.npy", "corpus.bin", "corpus.txt"]),
        (load_tokenizer, ["tokenizer.json", "a.model", "a.tiktoken", "vocab.txt"]),
        (lambda path: TensorFiles(path.parent), ["pytorch_model.bin", "model.safetensors"]),
        (
            lambda path: FattoribCheckpoint(
                str(path.parent), load_config(model_name="fattorib-smol")
            ),
            ["params_1"],
        ),
    ],
)
def test_pickles_named_as_something_else(tmp_path, marker, read, names):
    pickled = pickle.dumps(Touches(marker), 2)
    for name, content in itertools.product(names, (pickled, torch_archive(pickled))):
        (tmp_path / name).write_bytes(content)
        refused(f"{name}|{tmp_path}", read, tmp_path / name)
        (tmp_path / name).unlink()


def test_tokenizers_that_name_code(tmp_path, marker):
    """transformers would import a class that the settings name, with trust_remote_code."""
    settings = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(f"import os; os.mkdir({str(marker)!r})")
    refused(r"tokenizer\.json", load_tokenizer, tmp_path)


@pytest.mark.parametrize(
    "tagged",
    [
        "!!python/object/apply:os.mkdir ['{marker}']",
        "!!python/object/new:os.mkdir ['{marker}']",
        "!!python/name:os.mkdir '{marker}'",
        "!!python/module:os ''",
        "!!python/object:os.x {{}}",
        "[[!!python/object/apply:os.mkdir ['{marker}']]]",
        "!!binary YQ==",
        "!local x",
    ],
)
def test_tags_in_configurations(tmp_path, marker, tagged):
    path, text = tmp_path / "config.yml", tagged.format(marker=marker)
    for key in ("steps", "prompt", "adamw_mask", "base_config", "sweep"):
        path.write_text(f"{key}: {text}\n")
        with pytest.raises(ConfigurationError, match=f"{key}: .*tag !"):
            load([str(path), "dataset_type=synthetic"], "train.py")
    # On the command line they are text.
    loaded = load([f"prompt={text}", "dataset_type=synthetic"], "train.py")
    assert loaded.config.decoding.prompt == text
    with pytest.raises(ConfigurationError):
        load([f"steps={text}"])


def test_aliases_that_multiply(tmp_path):
    """Ten lines that stand for 10^9 values."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 1000)}]" for i in range(1, 4)]
    (tmp_path / "config.yml").write_text("\n".join([*lines, "adamw_mask: *a3"]))
    with pytest.raises(ConfigurationError, match=r"adamw_mask: .* 100,000"):
        load([str(tmp_path / "config.yml")])


@pytest.mark.parametrize(
    "text", ["[" * 20_000, "a: " + "{a: " * 5000, "- " * 5000, "a: [1\n", "a: 1\n---\na: 2\n"]
)
def test_configurations_nested_without_end_or_no_yaml(tmp_path, text):
    (tmp_path / "config.yml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"config\.yml"):
        load([str(tmp_path / "config.yml")])


def test_links_and_devices_in_archives_of_text(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            member = tarfile.TarInfo(f"{kind.decode()}.txt")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    assert read_documents(tmp_path / "a.tar") == ([], {})


@pytest.mark.parametrize("name", ["../../out.txt", "/tmp/out.txt", "a/../../out.txt", "C:\\a.txt"])
def test_names_that_lead_out_of_an_archive(tmp_path, name):
    folder = tmp_path / "here" / "deep"
    folder.mkdir(parents=True)
    (folder / "a.tar").write_bytes(tar_archive({name: b"some text"}))
    before = {*tmp_path.rglob("*")}
    assert read_texts(folder / "a.tar") == ["some text"]
    (folder / "a.tar").write_bytes(tar_archive({name.replace(".txt", ".npy"): npy(np.arange(3))}))
    (record,) = read_ids(str(folder / "a.tar"), "webdataset")
    assert record.ids.tolist() == [0, 1, 2]
    # Names are never paths: what a member holds is read, and nothing is written.
    assert {*tmp_path.rglob("*")} == before
