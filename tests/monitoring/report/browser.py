"""Chromium without a window, spoken to over its DevTools protocol, and what a page did in it."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE = 60.0


class Browser:
    """A tab.

    Attributes:
      errors: what the console showed as an error or a warning, and uncaught exceptions.
      requests: addresses that the page asked for.
    """

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = commands, answers
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def open(self, page: Path, width: int, *, scheme: str = "light") -> None:
        """Loads a file at a width in pixels, with nothing remembered of earlier pages."""
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=feature)
        self.resize(width, 900)
        self.errors.clear()
        self.requests.clear()
        self._loaded = False
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._next()

    def resize(self, width: int, height: int) -> None:
        """Makes the window another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, promises awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> Path:
        """A picture of the whole page, however long it is."""
        image = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(image))
        return path

    def _next(self) -> dict[str, Any]:
        """The next message; events are noted on the way."""
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            assert ready, "Chromium has not answered"
            read = os.read(self._answers, 1 << 20)
            assert read, "Chromium has gone"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, facts: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(facts["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning"):
            self.errors.append(str(facts["args"]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(facts["entry"]))


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Starts Chromium; skips the test where it is not installed.

    Args:
      folder: for its files.
    """
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip(f"needs one of {', '.join(_PROGRAMS)} (Debian: apt-get install chromium)")
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    # It takes commands on descriptor 3 and answers on 4; the shell puts the pipes there.
    shell = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
    process = subprocess.Popen(
        [
            *("bash", "-c", shell, "bash", program, "--headless=new", "--remote-debugging-pipe"),
            # Its sandbox needs rights that containers do not have.
            *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            # As on a phone, where they lie over the page.
            "--hide-scrollbars",
            # Nothing leaves the machine, not even what the browser itself would ask for.
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"),
            f"--user-data-dir={folder / 'chromium'}",
        ],
        pass_fds=(read_commands, write_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(commands, answers)
    finally:
        # Closing the pipe ends it, with all its processes.
        os.close(commands)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
