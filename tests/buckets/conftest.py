"""A bucket for each test, of an emulator that the tests of a file share."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.buckets.emulator import Fault
from tests.house.sources import REPOSITORY


@dataclasses.dataclass(frozen=True)
class Emulator:
    """The process that holds the buckets.

    Attributes:
      address: http://127.0.0.1:PORT.
    """

    address: str

    @property
    def environment(self) -> dict[str, str]:
        """What makes every client ask the emulator, see docs/buckets.md."""
        return {
            "STORAGE_EMULATOR_HOST": self.address,
            "TENSORSTORE_GCS_HTTP_URL": self.address,
            "FSSPEC_GS_TOKEN": "anon",
            "FSSPEC_GCS_TOKEN": "anon",
            # Asks over gRPC what kind of bucket it is.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "GCE_METADATA_HOST": "127.0.0.1:1",
            "NO_GCE_CHECK": "true",
            "GOOGLE_CLOUD_PROJECT": "test",
        }

    def make_bucket(self, name: str) -> None:
        """Creates an empty bucket."""
        self._ask("/storage/v1/b", {"name": name})

    def fail(self, *faults: Fault) -> None:
        """Lets requests fail as told; without arguments all are answered again."""
        self._ask("/faults", [dataclasses.asdict(fault) for fault in faults])

    @contextlib.contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        """The same while a block runs."""
        self.fail(*faults)
        try:
            yield
        finally:
            self.fail()

    @property
    def requests(self) -> dict[str, int]:
        """How often was asked for what, and how many faults there were."""
        return self._ask("/requests")

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """All objects of a bucket."""
        found, token = [], ""
        while True:
            page = self._ask(f"/storage/v1/b/{bucket}/o?prefix={prefix}&pageToken={token}")
            found += [item["name"] for item in page.get("items", [])]
            if not (token := page.get("nextPageToken", "")):
                return found

    def _ask(self, path: str, value: Any = None) -> Any:
        data = None if value is None else json.dumps(value).encode()
        with urllib.request.urlopen(f"{self.address}{path}", data) as answer:
            return json.loads(answer.read() or b"null")


@pytest.fixture(scope="session")
def emulator() -> Iterator[Emulator]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.buckets.emulator"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Emulator(process.stdout.readline().strip())
        process.stdin.close()
