"""Takes the place of the coordinator of jax.distributed: its key-value store, in this process."""

import threading
import time


class Coordinator:
    """A key-value store that fails, or hangs, if a test says so."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.is_gone = False
        self.answers = threading.Event()
        self.answers.set()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._answer()
        if key in self.values and not allow_overwrite:
            raise RuntimeError(f"ALREADY_EXISTS: Config key {key} already exists.")
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        self._answer()
        if key not in self.values:
            raise RuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return self.values[key]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        end = time.monotonic() + timeout_in_ms / 1000
        while key not in self.values:
            if time.monotonic() > end:
                raise RuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
            time.sleep(0.001)
        return self.key_value_try_get(key)

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        """Waits for nobody."""
        self._answer()

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self._answer()
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def _answer(self) -> None:
        self.answers.wait(60)
        if self.is_gone:
            raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")
