"""Text of a dataset on the Hugging Face Hub, read from a server on this machine."""

import http.server
import json
import threading
import urllib.parse

import pyarrow
import pytest
from huggingface_hub import HfFileSystem, constants
from pyarrow import parquet

from tests.input_pipeline.document_sources.test_corpus import read_texts
from tests.refusals import refused

COMMIT = "a" * 40


class Hub(http.server.ThreadingHTTPServer):
    """The part of the Hub's interface that reading a dataset needs."""

    def __init__(self, folder):
        super().__init__(("localhost", 0), HubRequest)
        self.folder = folder
        self.ranges = []


class HubRequest(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self):
        path = urllib.parse.urlparse(self.path).path
        files = [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "1" * 40}
            for file in self.server.folder.iterdir()
        ]
        if path.startswith("/api/datasets/me/set/tree/"):
            self.answer(200, json.dumps(files).encode())
        elif path.startswith("/api/datasets/me/set"):
            self.answer(200, json.dumps({"id": "me/set", "sha": COMMIT}).encode())
        elif path.startswith("/datasets/me/set/resolve/"):
            content = (self.server.folder / path.rpartition("/")[2]).read_bytes()
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            self.server.ranges.append((int(first), int(last)))
            self.answer(206, content[int(first) : int(last) + 1])
        else:
            self.answer(404, b"{}")

    def answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = Hub(tmp_path)
    # Both are made from HF_ENDPOINT when the package is imported.
    address = f"http://localhost:{server.server_port}"
    file_address = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", file_address)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    HfFileSystem.clear_instance_cache()
    yield server
    HfFileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()
    thread.join()


def test_rows_are_read_where_they_are(hub):
    texts = [f"document {number}" for number in range(20)]
    parquet.write_table(pyarrow.table({"text": texts[:12]}), hub.folder / "train-0.parquet")
    parquet.write_table(pyarrow.table({"text": texts[12:]}), hub.folder / "train-1.parquet")
    assert read_texts("hf://datasets/me/set") == texts
    assert hub.ranges
    assert read_texts("hf://datasets/me/set/*-1.parquet") == texts[12:]
    refused("me/absent cannot be looked at .*404", read_texts, "hf://datasets/me/absent")
