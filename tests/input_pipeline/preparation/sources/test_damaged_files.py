"""Files that are damaged, cut short or hold no text: an error that names the place, never less."""

import bz2
import io
import json
import lzma
import random
import sys
import tarfile
import zipfile

import pyarrow
import pytest
import zstandard

from MaxText.errors import UserError
from MaxText.input_pipeline.formats import tf_example, tfrecord
from MaxText.input_pipeline.preparation.sources import rows as rows_module
from tests.input_pipeline.preparation.sources.written_corpora import (
    COMPRESS,
    WRITERS,
    arrow_stream,
    counted,
    members_of,
    parquet_file,
    read_documents,
    read_texts,
    rows,
    tar,
    write_array_record,
    zipped,
)

# Little to compress, so that a file that is cut short lacks text.
TEXTS = [f"text {i} äöü " + random.Random(i).randbytes(200 * i).hex() for i in range(20)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"content": "x", "id": 3}\n', r"a\.jsonl:1 has no text.*: content\. Set"),
        ("a.jsonl", b'["x"]\n', r"a\.jsonl:1 is a JSON list"),
        ("a.jsonl", b'{"text": ["x", 1]}\n', r"a\.jsonl:1 has no text"),
        ("a.jsonl", b"[" * 200_000, r"a\.jsonl:1 is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1 is not UTF-8"),
        ("a.json", b'["x", 3]', r"a\.json, value 2 of its list, is a JSON int"),
        ("a.json", b'["x", "y"', r"a\.json is not JSON \(there is 'the end'"),
        ("a.json", b'["x"] more', r"a\.json is not JSON \(there is more behind"),
        ("a.json", b'["x",]', r"a\.json is not JSON"),
        ("a.json", b'["\xff"]', r"a\.json is not UTF-8"),
        ("a.txt", b"abc \xff def", r"a\.txt is not UTF-8 text \(byte 0xff at offset 4: inv"),
        ("a.txt", b"\xef\xbb\xbfabc \xff def", r"0xff at offset 7"),
        ("a.txt.gz", b"not packed", r"a\.txt\.gz is not a whole compressed file"),
        ("a.txt.gz", b"", r"a\.txt\.gz is not a whole compressed file: it is empty"),
        ("a.txt.zst", b"not packed", r"a\.txt\.zst is not a whole compressed file"),
        ("a.txt.xz", b"not packed", r"a\.txt\.xz is not a whole compressed file"),
        ("a.txt.bz2", b"not packed", r"a\.txt\.bz2 cannot be read"),
        ("a.dat.zst", zstandard.compress(b"0000000000000003ab"), r"ends at byte 18, inside docu"),
        ("a.dat.zst", zstandard.compress(b"000000003ab"), "is damaged at byte 0"),
        ("a.dat.zst", zstandard.compress(b"9" * 16), "ends at byte 16, inside document 0"),
        ("a.dat.zst", zstandard.compress(b"0000000000000001\xff"), "byte 0xff at offset 16"),
        ("a.gz", COMPRESS["gz"](b"ab\n\xff\n"), r"a\.gz:2 is not UTF-8"),
        ("a.tar", b"no archive", "is not a whole archive"),
        ("a.tar", b"", "is not a whole archive"),
        ("a.zip", b"no archive", "is not a whole archive"),
        ("a.tar", tar([("b.txt", b"\xff")]), r"a\.tar, member 'b\.txt', is not UTF-8"),
        ("a.tar", tar([("b.parquet", b"PAR1")]), r"member 'b\.parquet', is no text"),
        ("a.tar", tar([("b.png", b"\x89")]), r"member 'b\.png', is no text"),
        ("a.tar", tar([("b.jsonl.gz", b"x")]), r"member 'b\.jsonl\.gz', is not a whole compr"),
        ("a.parquet", b"PAR1", r"a\.parquet cannot be read"),
        ("a.parquet", b"", r"a\.parquet cannot be read"),
        ("a.arrow", b"", r"a\.arrow cannot be read"),
        ("a.arrow", b"ARROW1 and no more", r"a\.arrow cannot be read"),
        ("a.array_record", b"", "no whole ArrayRecord file"),
        ("a.array_record", b"x" * 200_000, "no whole ArrayRecord file"),
        ("a.tfrecord", b"x" * 100, "CRC of the record's length"),
        ("a.tfrecord", tfrecord.frame(b"x")[:-1], r"Copy the file again or leave it out of prep"),
        ("a.jsonl", b'{"id": 3}\n', r"in field 'text' or any other\. Leave the file out of prep"),
        ("a.tfrecord", tfrecord.frame(b"\xff"), r"a\.tfrecord, record 0, is not UTF-8"),
        (
            "a.tfrecord",
            tfrecord.frame(tf_example.encode({"text": [1], "body": b"x"})),
            r"record 0, has no text in field 'text'; fields with text: body\.",
        ),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_texts(tmp_path / name)


@pytest.mark.parametrize(
    "ending", [e for e in WRITERS if e not in (".jsonl", ".json", "_strings.jsonl", ".arrow")]
)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_files_that_were_cut_short_are_noticed(tmp_path, ending, share):
    path = tmp_path / (ending if ending[0] in "ou" else f"a{ending}")
    WRITERS[ending](path, TEXTS)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError, match=path.name.replace(".", r"\.")):
        read_texts(path)


def test_rows_that_were_cut_short_are_noticed_inside_a_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS)[:-3])
    with pytest.raises(UserError, match=r"a\.jsonl:20 is not JSON"):
        read_texts(tmp_path / "a.jsonl")
    stream = arrow_stream(TEXTS)
    (tmp_path / "a.arrow").write_bytes(stream[: len(stream) // 2])
    with pytest.raises(UserError, match=r"a\.arrow cannot be read"):
        read_texts(tmp_path / "a.arrow")


def test_a_damaged_header_does_not_end_an_archive(tmp_path):
    content = bytearray(tar([(f"{i}.txt", b"text") for i in range(3)]))
    at = content.index(b"1.txt")
    content[at + 110] ^= 1
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.tar is not a whole archive: at byte {at}: bad check"):
        read_texts(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(tar(members_of(["a", "b"]))[: -2 * 512 - 8192])
    with pytest.raises(UserError, match="not a whole archive"):
        read_texts(tmp_path / "a.tar")


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_flipped_bit_is_noticed(tmp_path, compression):
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    pack = compressor.compress if compression == "zst" else COMPRESS[compression]
    content = bytearray(pack("".join(TEXTS).encode()))
    content[len(content) // 2] ^= 16
    (tmp_path / f"a.txt.{compression}").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.txt\.{compression} "):
        read_texts(tmp_path / f"a.txt.{compression}")


def test_damaged_records_are_named(tmp_path):
    records = [text.encode() * 9 for text in TEXTS]
    write_array_record(tmp_path / "a.array_record", records)
    content = bytearray((tmp_path / "a.array_record").read_bytes())
    content[300] ^= 1
    (tmp_path / "a.array_record").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.array_record is no whole ArrayRecord file \(near rec"):
        read_texts(tmp_path / "a.array_record")


def test_encrypted_archives_are_refused(tmp_path):
    content = bytearray(zipped(["text"]))
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + flags] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"'folder/.*0\.txt', cannot be read .*encrypted"):
        read_texts(tmp_path / "a.zip")


def test_names_in_archives_are_no_paths(tmp_path):
    names = ["../outside.txt", "/tmp/absolute.txt", "a\x1b[31m.txt"]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(tar([(name, b"text") for name in names]))
    with zipfile.ZipFile(tmp_path / "in" / "b.zip", "w") as archive:
        for name in names:
            archive.writestr(name, b"text")
    documents, _ = read_documents(tmp_path / "in")
    assert [(document.file, document.row) for document in documents] == [
        (name, row) for name in ("a.tar", "b.zip") for row in range(3)
    ]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar", "b.zip", "in"]


def test_links_and_hidden_files_of_archives_are_counted(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        for name in ("._a.txt", "b.txt"):
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"ab"))
    documents, skipped = read_documents(tmp_path / "a.tar")
    assert [document.text for document in documents] == ["ab"]
    assert skipped == {"links and devices in archives": 1, "hidden files in archives": 1}


def test_hidden_folders_of_archives_are_left_out_as_those_on_disk(tmp_path):
    members = [("a/.git/objects/x", b"\xff"), ("./a/b.txt", b"text"), ("../c.txt", b"up")]
    (tmp_path / "a.tar").write_bytes(tar(members))
    documents, skipped = read_documents(tmp_path / "a.tar")
    assert [document.text for document in documents] == ["text", "up"]
    assert skipped == {"hidden files in archives": 1}


@pytest.mark.parametrize("compression", ["", ".gz"])
def test_archives_put_together_with_cat_are_refused(tmp_path, compression):
    pack = COMPRESS["gz"] if compression else bytes
    content = b"".join(pack(tar([(name, b"text")])) for name in ("a.txt", "b.txt"))
    (tmp_path / f"a.tar{compression}").write_bytes(content)
    with pytest.raises(UserError, match=r"goes on behind its end, as archives do that .* cat"):
        read_texts(tmp_path)


def test_archives_in_archives_end_somewhere(tmp_path):
    content = b"text"
    for depth in range(6):
        content = tar([(f"{depth}.tar" if depth else "a.txt", content)])
        (tmp_path / f"{depth}_deep.tar").write_bytes(content)
    assert read_texts(tmp_path / "3_deep.tar") == ["text"]
    with pytest.raises(UserError, match="lies in more than 4 archives"):
        read_texts(tmp_path / "5_deep.tar")


def test_lines_of_gz_are_documents(tmp_path):
    (tmp_path / "wiki.gz").write_bytes(COMPRESS["gz"]("one\ntwo ä\r\n\nthree".encode()))
    (tmp_path / "x.py.gz").write_bytes(COMPRESS["gz"](b"one\ntwo"))
    documents, skipped = read_documents(f"{tmp_path}/*.gz")
    assert [(d.text, d.row) for d in documents] == [
        ("one", 0),
        ("two ä", 1),
        ("three", 3),
        ("one\ntwo", 0),
    ]
    assert skipped == {"empty": 1}


def test_a_file_without_lines_is_no_file_of_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "LONGEST_ROW", 100)
    (tmp_path / "a.jsonl").write_bytes(rows(["x" * 50, "y" * 200]))
    with pytest.raises(UserError, match=r"a\.jsonl:2 is longer than 100 bytes"):
        read_texts(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text(json.dumps(["x" * 300]))
    monkeypatch.setattr(rows_module, "_PIECE_BYTES", 16)
    with pytest.raises(UserError, match=r"a\.json is not JSON \(a value is longer than 100"):
        read_texts(tmp_path / "a.json")


def test_long_lists_are_read_a_piece_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "_PIECE_BYTES", 3)
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(TEXTS, ensure_ascii=False, indent=2))
    assert read_texts(tmp_path / "a.json") == TEXTS


def test_half_surrogates_become_replacement_characters(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude42"}\n')
    (tmp_path / "b.json").write_text('["\\ude42b"]')
    assert read_texts(tmp_path) == ["a\ufffd", "\U0001f642", "\ufffdb"]


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.large_string(),
        pyarrow.binary(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
)
def test_columns_of_text_in_other_types(tmp_path, kind):
    texts = ["a", None, "ä", "", "漢"]
    column = [text.encode() if text and pyarrow.types.is_binary(kind) else text for text in texts]
    (tmp_path / "a.arrow").write_bytes(arrow_stream(column, kind))
    documents, skipped = read_documents(tmp_path / "a.arrow")
    assert [(document.text, document.row) for document in documents] == [
        ("a", 0),
        ("ä", 2),
        ("漢", 4),
    ]
    assert skipped == {"empty": 2}


def test_columns_of_paragraphs(tmp_path):
    kind = pyarrow.list_(pyarrow.string())
    (tmp_path / "a.parquet").write_bytes(parquet_file([["a", "b"], [], ["c", None]], kind))
    documents, skipped = read_documents(tmp_path / "a.parquet")
    assert [(document.text, document.row) for document in documents] == [("a\n\nb", 0), ("c", 2)]
    assert skipped == {"empty": 1}


@pytest.mark.parametrize("content", [parquet_file(["a"]), arrow_stream(["a"])])
def test_missing_columns_are_named(tmp_path, content):
    name = "a.parquet" if content.startswith(b"PAR1") else "a.arrow"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"no text in field 'body'; fields with text: text\. Set"):
        read_texts(tmp_path / name, "body")
    with pytest.raises(UserError, match="no text in field 'number'"):
        read_texts(tmp_path / name, "number")


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.arrow").write_bytes(arrow_stream([b"a", b"\xff"], pyarrow.binary()))
    with pytest.raises(UserError, match=r"a\.arrow, row 1, is not UTF-8 text \(byte 0xff"):
        read_texts(tmp_path / "a.arrow")
    invalid = pyarrow.array([b"a", b"\xff"], pyarrow.binary()).view(pyarrow.string())
    data = pyarrow.table({"text": invalid})
    with pyarrow.ipc.new_stream(str(tmp_path / "b.arrow"), data.schema) as writer:
        writer.write_table(data)
    with pytest.raises(UserError, match=r"b\.arrow: field 'text' of a row in 0 to 1 is not UTF-8"):
        read_texts(tmp_path / "b.arrow")


def test_missing_pyarrow_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(parquet_file(["a"]))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'MaxText\[data\]'"):
        read_texts(tmp_path / "a.parquet")


def test_array_records_are_local(tmp_path):
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe("/records/a.array_record", b"x")
    try:
        with pytest.raises(UserError, match="local file system only"):
            read_texts("memory://records/a.array_record")
    finally:
        system.rm("/records", recursive=True)


def test_text_that_looks_like_a_record_stays_text(tmp_path):
    texts = ["\n", "\n\x01a", "\n\x02\n\x00", "\x0a\x04\x0a\x02\x0a\x09 more", "plain"]
    write_array_record(tmp_path / "a.array_record", [text.encode() for text in texts])
    assert read_texts(tmp_path / "a.array_record") == texts[1:]


def test_several_frames_are_one_file(tmp_path):
    parts = ["first ", "second ", "third"]
    packers = {
        "gz": COMPRESS["gz"],
        "xz": lzma.compress,
        "bz2": bz2.compress,
        "zst": zstandard.compress,
    }
    for compression, pack in packers.items():
        content = b"".join(pack(part.encode()) for part in parts)
        (tmp_path / f"a.txt.{compression}").write_bytes(content)
    assert read_texts(tmp_path) == ["first second third"] * 4


def test_zeros_between_streams_of_xz(tmp_path):
    content = lzma.compress(b"first ") + bytes(8) + lzma.compress(b"second") + bytes(4)
    (tmp_path / "a.txt.xz").write_bytes(content)
    assert read_texts(tmp_path) == ["first second"]


@pytest.mark.parametrize(("ending", "pack"), [("xz", lzma.compress), ("bz2", bz2.compress)])
def test_a_damaged_later_stream_is_noticed(tmp_path, ending, pack):
    content = pack(b"first ") + b"?" + pack(b"second")[1:]
    (tmp_path / f"a.txt.{ending}").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.txt\.{ending} (is not a whole|cannot be read)"):
        read_texts(tmp_path)


def test_a_byte_order_mark_alone_is_no_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf\r\n"text"')
    documents, _ = read_documents(tmp_path)
    assert [(each.text, each.file, each.row) for each in documents] == [("text", "b.jsonl", 1)]


def test_wide_zstd_windows(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    content = compressor.compress(counted(TEXTS)) + compressor.flush()
    (tmp_path / "a.dat.zst").write_bytes(content)
    assert read_texts(tmp_path / "a.dat.zst") == TEXTS


def test_every_cut_of_zstd_is_noticed(tmp_path):
    content = zstandard.compress(rows(TEXTS[:2]))
    path = tmp_path / "a.jsonl.zst"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"a\.jsonl\.zst is not a whole compressed file"):
            read_texts(path)
    path.write_bytes(content)
    assert read_texts(path) == TEXTS[:2]
