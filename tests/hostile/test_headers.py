"""Headers that claim what the file does not hold, and texts nested without end."""

import contextlib
import itertools
import json
import re
import struct

import pyarrow
import pyarrow.parquet  # noqa: F401
import pytest

from MaxText.config.loading import load_config
from MaxText.conversion.hf_checkpoint import TensorFiles, read_json
from MaxText.conversion.hf_config import config_from_hf, resolve_family
from MaxText.errors import UserError
from MaxText.evaluation import tasks
from MaxText.inference import checkpoint_config
from MaxText.input_pipeline.document_sources.records import read_ids
from MaxText.input_pipeline.token_store.megatron import MAGIC, read_header
from MaxText.input_pipeline.tokenization.load_tokenizer import load_tokenizer
from MaxText.storage.errors import BadRecordError
from MaxText.storage.file_access import file_info
from tests.hostile.files import tar_archive, torch_archive
from tests.input_pipeline.document_sources.written_corpora import read_texts
from tests.refusals import refused

DEEP = "[" * 100_000


def _safetensors(header: object, length: int | None = None, content: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def _tensor(shape: list[int], offsets: list[int], kind: str = "F32") -> dict:
    return {"weight": {"dtype": kind, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "content",
    [
        _safetensors({}, 1 << 60), _safetensors({}, (1 << 64) - 1),
        _safetensors(_tensor([1 << 60], [0, 1 << 62])),
        _safetensors(_tensor([4], [0, 16]), content=b"short"),
        _safetensors(_tensor([1], [1 << 40, (1 << 40) + 4])),
        _safetensors(_tensor([1], [4, 0]), content=bytes(8)),
        _safetensors(_tensor([1 << 62, 1 << 62], [0, 0])),
        _safetensors(_tensor([-1], [0, 4]), content=bytes(4)),
        _safetensors(_tensor([1], [0, 4], "PICKLE"), content=bytes(4)),
        struct.pack("<Q", len(DEEP)) + DEEP.encode(), b"", b"\x08",
    ],
)  # fmt: skip
def test_weights_whose_header_lies(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(r"model\.safetensors", TensorFiles, tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i8', 'fortran_order': False, 'shape': (1152921504606846976,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999999999999,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (8000000000,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (-1,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }",
        "{'descr': '<V99999999999', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': __import__('os').system('exit 1')}",
        "(" * 110,
        "{'descr': (",
        None,
    ],
)
def test_arrays_whose_header_lies(tmp_path, header):
    text = (header or "").encode().ljust(118)
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(16)
    content = content if header else torch_archive(b"")  # a zip archive, as .npz is one
    (tmp_path / "a.tar").write_bytes(tar_archive({"0.input_id.npy": content}))
    (record,) = read_ids(str(tmp_path / "a.tar"), "webdataset")
    assert ".npy" in record.reason or not header


def test_indices_whose_header_lies(tmp_path):
    for sequences, documents in itertools.product(
        (1 << 40, 1 << 62, (1 << 64) - 1, 2), (1, 1 << 62, (1 << 64) - 1)
    ):
        header = struct.pack("<9sQBQQ", MAGIC, 1, 4, sequences, documents)
        (tmp_path / "a.idx").write_bytes(header + bytes(64))
        path = tmp_path / "a.idx"
        refused(r"a\.idx", read_header, path, file_info(str(path)))


@pytest.mark.parametrize("length", [1, 1 << 20, (1 << 31) - 1, (1 << 32) - 1])
def test_tables_whose_header_lies(tmp_path, length):
    packed = struct.pack("<I", length)
    for name, content in {
        "a.parquet": b"PAR1" + bytes(64) + packed + b"PAR1",
        "file.arrow": b"ARROW1\0\0" + packed + bytes(64) + packed + b"ARROW1",
        "stream.arrow": b"\xff\xff\xff\xff" + packed + bytes(64) + packed + b"ARROW1",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadRecordError):
            list(read_ids(str(tmp_path / name), name.rsplit(".")[1]))
        refused(re.escape(name), read_texts, tmp_path / name)


def test_lists_that_lead_out_of_an_arrow_file(tmp_path):
    """Offsets are read as they are; without a look at them this reads other memory."""
    ids = pyarrow.array([[1, 2], [3]], pyarrow.list_(pyarrow.int32()))
    for values, read, error in (
        (ids, lambda path: list(read_ids(str(path), "arrow")), BadRecordError),
        (pyarrow.array(["ab", "c"]), read_texts, UserError),
    ):
        table = pyarrow.table({"text": values})
        with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table)
        content = (tmp_path / "a.arrow").read_bytes()
        offsets = struct.pack("<3i", 0, 2, 3)
        assert content.count(offsets) == 1
        wrong = content.replace(offsets, struct.pack("<3i", 0, 1 << 30, 1 << 30))
        (tmp_path / "a.arrow").write_bytes(wrong)
        with pytest.raises(error, match=r"a\.arrow"):
            read(tmp_path / "a.arrow")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("list.json", read_texts),
        ("rows.jsonl", read_texts),
        ("lambada.jsonl", lambda path: tasks.read_passages(str(path))),
        ("config.json", read_json),
        (
            "config.json",
            lambda path: checkpoint_config.load(
                [f"load_parameters_path=hf:{path.parent}"], "decode.py"
            ),
        ),
        ("model.safetensors.index.json", lambda path: TensorFiles(path.parent)),
    ],
)
def test_texts_nested_without_end(tmp_path, name, read):
    for text in (DEEP, '{"text": ' + DEEP):
        (tmp_path / name).write_text(text)
        refused(f"{name}.* JSON", read, tmp_path / name)


@pytest.mark.parametrize(
    "content", [DEEP, '{"a": ' * 100_000, "{}", "[]", "null", "9" * 5000, "\x00", '{"model": {}}']
)
def test_tokenizers_that_are_none(tmp_path, content):
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError):
            load_tokenizer(tmp_path)
        (tmp_path / name).unlink()


_WRONG = (
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    float("inf"),
    float("nan"),
    10**30,
    10**400,
    "",
    "x",
    "9" * 5000,
    [],
    [[]],
    ["x"],
    {},
    {"a": {"b": []}},
    {"type": []},
    {"rope_type": {}},
)
_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
# Names of the keys of config.json where they are others.
_FAMILIES = {
    "llama": {},
    "mistral": {},
    "gemma": {},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "n_positions": 16},
    "gpt_neo": {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
}


@pytest.mark.parametrize("model_type", _FAMILIES)
def test_configurations_of_anything(model_type):
    config = {"model_type": model_type, **_SIZES, **_FAMILIES[model_type]}
    load_config(**config_from_hf(resolve_family(config, "folder"), config, "folder", {}))
    for name in (*config, "rope_scaling", "rope_parameters", "sliding_window", "architectures"):
        for wrong in _WRONG:
            broken = {**config, name: wrong}
            with contextlib.suppress(UserError):
                family = resolve_family(broken, "folder")
                load_config(**config_from_hf(family, broken, "folder", {}))
