"""Takes the place of the coordinator of jax.distributed: its key-value store, in this process."""

import threading


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

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self._answer()
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def _answer(self) -> None:
        self.answers.wait(60)
        if self.is_gone:
            raise RuntimeError("UNAVAILABLE: failed to connect to all addresses")
