"""SIGTERM, Ctrl-C and preemption notices: save at the end of a step and stop.

jax is not imported: the handler must be installed before jax starts.
"""

import contextlib
import os
import signal
import socket
import sys
import threading

from MaxText.exit_codes import INTERRUPTED, PREEMPTED

# What a shell reports of a process that SIGTERM has ended.
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM


class StopSignal:
    """Decides once per update, alike in every process, whether to save and stop.

    One process: a handler of ours. Several: jax's preemption service, which replaces the handler
    when jax.distributed is initialized; a notice to one of them makes all agree on one update, at
    most a few later (multihost_utils.reached_preemption_sync_point).

        stop = StopSignal.install()             # in main(), before anything slow
        ...
        for step in range(first_step, last_step + 1):
            ...                                 # the update, and its checkpoint if one is due
            if stop.requested(step):
                save(step)                      # if it was not just saved
                break                           # close checkpoints; exit_codes.PREEMPTED

    Before the first call of `requested` the first signal ends the process with `exit_code`: there
    is nothing to save yet. A second one always ends it at once; SIGTERM then with 143. In a run of
    several processes Ctrl-C is a KeyboardInterrupt.

    Attributes:
      exit_code: exit_codes.INTERRUPTED after Ctrl-C, else exit_codes.PREEMPTED.
    """

    def __init__(self):
        self.exit_code = PREEMPTED
        self._received = 0
        self._in_loop = False
        self._calls = 0
        self._agreed = False
        self._several: bool | None = None  # whether jax's service is in charge; unknown at first

    @classmethod
    def install(cls) -> "StopSignal":
        """Handles SIGTERM and Ctrl-C, except those that the parent process ignores.

        Call it on the main thread, before `start_up.connect`.
        """
        stop = cls()
        handlers = {signal.SIGTERM: lambda *_: None, signal.SIGINT: stop._interrupt}
        taken = [number for number in handlers if signal.getsignal(number) is not signal.SIG_IGN]
        if not taken:
            return stop
        # A handler in Python runs only when the main thread runs Python, which it does not while it
        # waits for a device. So a thread reads the number that the C handler writes here.
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        for number in taken:
            signal.signal(number, handlers[number])
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        threading.Thread(
            target=stop._listen, args=(reading, writing), daemon=True, name="signals"
        ).start()
        return stop

    def requested(self, step: int) -> bool:
        """Returns whether to save and stop now; stays true.

        Cheap. Every process calls it once per update, alike. `step` is the update just done.
        """
        self._in_loop = True
        # Counted here, not taken from `step`: the service compares numbers of calls, and after a
        # rewind steps come again.
        self._calls += 1
        if self._several is None:
            self._several = _has_service()
        if not self._several:
            return self._received > 0
        if self._agreed:
            return True
        from jax.experimental import multihost_utils

        if not multihost_utils.reached_preemption_sync_point(self._calls):
            return False
        self._agreed = True
        _say(f"SIGTERM or a preemption notice: all processes save and stop after step {step}")
        # jax swallows every SIGTERM from its start on. A second one shall end us.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return True

    def is_pending(self) -> bool:
        """Whether a single process got SIGTERM, so that waits should end at once.

        Never among several: the others are in an update already, which needs this one's data.
        """
        return self._in_loop and self._received > 0

    def _listen(self, reading: socket.socket, _writing: socket.socket) -> None:
        # Both ends are kept by this thread, or they would be closed when the caller returns.
        while numbers := reading.recv(64):
            for number in numbers:
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._take(number)

    def _take(self, number: int) -> None:
        by_user = number == signal.SIGINT
        name = "Ctrl-C" if by_user else "SIGTERM"
        self._received += 1
        if self._received > 1:
            _say(f"second {name}: stopping at once")
            os._exit(INTERRUPTED if by_user else _ENDED_BY_SIGTERM)
        if by_user:
            self.exit_code = INTERRUPTED
        if not self._in_loop:
            _say(f"{name} before the first step: stopping, there is nothing to save")
            os._exit(self.exit_code)
        elif by_user and self._several:
            _say("Ctrl-C: stopping without saving; SIGTERM saves in a run of several processes")
        else:
            _say(f"{name}: saving and stopping after this step; a second one stops at once")

    def _interrupt(self, *_: object) -> None:
        """Python's handler of Ctrl-C; `_take` gets it as well."""
        if self._several:
            raise KeyboardInterrupt

    def summary(self, saved: int | None, run_name: str) -> str:
        """Returns what is saved (step, None without) and how to resume."""
        how = "Interrupted" if self.exit_code == INTERRUPTED else "Preempted"
        if saved is None:
            return f"{how}. No checkpoint was saved."
        return (
            f"{how}. Saved: step {saved}. Run the same command with run_name={run_name} to resume."
        )


def _has_service() -> bool:
    """Returns whether jax.distributed handles SIGTERM."""
    import jax

    return jax.distributed.is_initialized()


def _say(line: str) -> None:
    """Writes in one call, whatever the main thread is printing."""
    # It may be closed, or in use by the thread that was interrupted.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
    os.write(2, f"{line}\n".encode())
