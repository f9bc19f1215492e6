"""A bucket for each test, of an emulator that the tests of a file share."""

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any
from unittest import mock

import fsspec
import gcsfs.retry
import pytest

from MaxText.storage.paths import register_filesystems
from tests.house.sources import REPOSITORY
from tests.storage.emulator import Fault

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Emulator:
    """The process that holds the buckets, at http://127.0.0.1:PORT. A URL is gs://BUCKET/NAME."""

    address: str

    @property
    def environment(self) -> dict[str, str]:
        """What makes every client ask the emulator, see docs/how-to/use_cloud_storage.md."""
        hosts = ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL")
        return dict.fromkeys(hosts, self.address) | {
            "FSSPEC_GS_TOKEN": "anon",
            "FSSPEC_GCS_TOKEN": "anon",
            "GCE_METADATA_HOST": "127.0.0.1:1",
            "NO_GCE_CHECK": "true",
            "GOOGLE_CLOUD_PROJECT": "test",
        }

    def make_bucket(self, name: str) -> None:
        self._ask("/storage/v1/b", {"name": name})

    def write(self, url: str, content: bytes) -> None:
        """Writes an object, as somebody else."""
        bucket, name = _parts(url)
        self._send(f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}", content)

    def read(self, url: str) -> str:
        bucket, name = _parts(url)
        return self._send(f"/download/storage/v1/b/{bucket}/o/{name}?alt=media").decode()

    @contextlib.contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        """Lets requests fail as told while a block runs."""
        self._ask("/faults", [dataclasses.asdict(fault) for fault in faults])
        try:
            yield
        finally:
            self._ask("/faults", [])

    @property
    def requests(self) -> dict[str, int]:
        """How often was asked for what, and how many faults there were."""
        return self._ask("/requests")

    def names(self, url: str) -> list[str]:
        """The objects of a bucket whose names begin so."""
        bucket, prefix = _parts(url)
        found, token = [], ""
        while True:
            page = self._ask(f"/storage/v1/b/{bucket}/o?prefix={prefix}&pageToken={token}")
            found += [item["name"] for item in page.get("items", [])]
            if not (token := page.get("nextPageToken", "")):
                return found

    def _ask(self, path: str, value: Any = None) -> Any:
        data = None if value is None else json.dumps(value).encode()
        return json.loads(self._send(path, data) or b"null")

    def _send(self, path: str, data: bytes | None = None) -> bytes:
        with urllib.request.urlopen(f"{self.address}{path}", data) as answer:
            return answer.read()


def _parts(url: str) -> tuple[str, str]:
    bucket, _, name = url.removeprefix("gs://").partition("/")
    return bucket, urllib.parse.quote(name, safe="")


@pytest.fixture(scope="session")
def emulator() -> Iterator[Emulator]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.storage.emulator"],
        cwd=REPOSITORY,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield Emulator(process.stdout.readline().strip())
        process.stdin.close()


@pytest.fixture
def bucket(emulator: Emulator) -> str:
    """An empty bucket: gs://NAME."""
    name = f"bucket-{next(_numbers)}"
    emulator.make_bucket(name)
    return f"gs://{name}"


@pytest.fixture(scope="module")
def clients(emulator: Emulator) -> Iterator[None]:
    """Lets this process ask the emulator."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in emulator.environment.items():
            patch.setenv(name, value)
        # fsspec has read the environment already.
        patch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
        register_filesystems("a test")
        yield


@pytest.fixture
def no_waits(clients: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs tries again at once, as often as ever."""
    monkeypatch.setattr(gcsfs.retry, "asyncio", mock.Mock(sleep=mock.AsyncMock()))
