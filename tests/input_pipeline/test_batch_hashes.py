"""Batches and positions, bit for bit, of every way to read prepared data.

A run resumes on the same samples only if these hashes stay. Record new cases with
`UPDATE_BATCH_HASHES=1 pytest tests/input_pipeline/test_batch_hashes.py`.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from MaxText.config.data_sections import MaskingConfig
from MaxText.input_pipeline.data_sources import prepared_has_documents
from MaxText.input_pipeline.sequences.batch_schedule import BatchSchedule, ScheduleStage
from tests.input_pipeline.small_data import (
    LENGTH,
    data_keys,
    fields,
    join,
    open_eval,
    open_train,
    random_documents,
    run_config,
    take,
    write_data_set,
)
from tests.input_pipeline.token_store import token_files

HASHES = Path(__file__).with_name("batch_hashes.json")
MASKED = {"masking": MaskingConfig(mlm_training=True, **{"mlm.mask_id": 3})}
RAMPED = BatchSchedule(
    (
        ScheduleStage(0, 4, LENGTH // 2),
        ScheduleStage(2, 8, LENGTH // 2),
        ScheduleStage(3, 8, LENGTH),
    ),
    LENGTH,
)
MIX = [("a", 1, "chunks", 1.0), ("b", 2, "documents_random", 2.5), ("c", 1, "documents_fixed", 0.7)]

# name -> data set, keys of data, arguments of make_train_iterator
CASES = {
    "chunks": ("a", {}, {}),
    "chunks_in_array_record": ("chunked", {}, {}),
    "chunks_across_documents": ("a", {"cross_document_attention": True}, {}),
    "in_order": ("a", {"enable_data_shuffling": False, "num_epoch": 1}, {}),
    "epochs_and_seed": ("b", {"num_epoch": 3, "data_shuffle_seed": 7}, {}),
    "first_fit": ("a", {"grain_packing_type": "first_fit"}, {}),
    "best_fit": ("chunked", {"grain_packing_type": "best_fit"}, {}),
    "one_document_per_row": ("a", {"packing": False, "zero_loss": False}, {}),
    "truncated": ("a", {"packing": False, "use_truncation": True}, {}),
    "masked": ("a", {}, MASKED),
    "masked_first_fit": ("a", {"grain_packing_type": "first_fit"}, MASKED),
    "stages": ("a", {}, {"schedule": RAMPED}),
    "excluded": ("a", {"excluded_samples": [(3, 5), (17, 31)]}, {}),
    "mixture": (MIX, {}, {}),
    "mixture_by_size": (MIX, {"mixture_temperature": 2.0}, {"schedule": RAMPED}),
    "megatron": ("m", {}, {}),
    "gpt_neox_order": ("m", {"megatron.order": "gpt_neox"}, {"steps": 6}),
    "tfrecord": ("t", {"token_records.eos_id": 0}, {}),
    "groups_of_files": ("t", {"iter_file_nums": 2}, {}),
}
STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hashed")
    for seed, name in enumerate("abc"):
        splits = {"train": random_documents(seed, 90, 50), "validation": random_documents(9, 9, 50)}
        write_data_set(folder / name, splits)
    train = {"train": random_documents(0, 90, 50)}
    write_data_set(folder / "chunked", train, file_format="array_record")
    (folder / "m").mkdir()
    token_files.write_megatron(folder / "m" / "m", random_documents(4, 90, 50))
    documents = random_documents(5, 90, 50)
    token_files.write("tfrecord", folder / "t", [documents[i::3] for i in range(3)])
    return folder


def _digest(batches) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        # The hashes contain the names that the fields had when they were recorded.
        named = {name.replace("loss_mask", "weights"): x for name, x in fields(batch).items()}
        for name, values in sorted(named.items()):
            digest.update(f"{name} {values.dtype} {values.shape}".encode())
            digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()[:16]


def _keys(folder, where, keys):
    keys = {"data_cache_dir": str(folder / "cache"), **keys}
    if isinstance(where, str):
        return data_keys(folder / where, **keys)
    mix = tuple((str(folder / name), *rest) for name, *rest in where)
    return data_keys("", data_mixture_weights=mix, **keys)


def _train(folder, name, hosts: int) -> tuple[str, dict]:
    where, keys, options = CASES[name]
    data = _keys(folder, where, keys)
    readers = [open_train(data, host=host, hosts=hosts, **options) for host in range(hosts)]
    if where in ("a", "chunked") and "schedule" not in options:  # as prepare_source makes
        assert prepared_has_documents(run_config(data, **options)) == readers[0].has_documents
    by_host = [take(reader, STEPS) for reader in readers]
    return _digest(map(join, zip(*by_host, strict=True))), readers[0].get_state()


@pytest.mark.parametrize("name", CASES)
def test_training_batches_and_positions(folder, name):
    digest, position = _train(folder, name, hosts=1)
    assert [_train(folder, name, hosts)[0] for hosts in (2, 4)] == [digest] * 2
    _check(name, [digest, position])


def test_evaluation_batches(folder):
    for name, where in (("eval", "a"), ("eval_mixture", MIX)):
        keys = _keys(folder, where, {})
        digest = _digest(open_eval(keys))
        halves = [list(open_eval(keys, host=host, hosts=2)) for host in range(2)]
        assert _digest(map(join, zip(*halves, strict=True))) == digest
        _check(name, [digest])


def _check(name: str, found: list) -> None:
    found = json.loads(json.dumps(found))
    hashes = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    if "UPDATE_BATCH_HASHES" in os.environ:
        hashes[name] = found
        HASHES.write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")
    assert found == hashes[name]
