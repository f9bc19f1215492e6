"""SIGTERM, and other notices that this machine goes away: the run saves at a step's end and stops.

Imports no jax: the handler must be in place before jax starts.
"""

import contextlib
import os
import signal
import socket
import sys
import threading

from MaxText.exit_codes import PREEMPTED

# What a shell reports of a process that SIGTERM has ended.
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM


class StopSignal:
    """Says, once per update and alike in every process, whether to save and stop.

    One process: a handler of ours. Several: jax's preemption service, which takes the place of the
    handler when jax.distributed is initialised; a notice to one of them makes all agree on one
    update, at most a few later (multihost_utils.reached_preemption_sync_point).

    Use:

        stop = StopSignal.install()             # in main(), before anything slow
        ...
        for step in range(first_step, last_step + 1):
            ...                                 # the update, and its checkpoint if one is due
            if stop.requested(step):
                save(step)                      # if it was not just saved
                break                           # close checkpoints; exit_codes.PREEMPTED

    The first SIGTERM before the first call of `requested` ends the process at once with
    exit_codes.PREEMPTED: there is nothing to save yet. So does a second one at any time, with 143.
    """

    def __init__(self):
        """Use `install`."""
        self._received = 0
        self._in_loop = False
        self._calls = 0
        self._agreed = False
        self._several: bool | None = None  # whether jax's service is in charge; unknown at first

    @classmethod
    def install(cls) -> "StopSignal":
        """Takes over SIGTERM. Call it on the main thread, before `start_up.connect`."""
        stop = cls()
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            return stop  # whoever started us wants it so
        # A handler in Python runs only when the main thread runs Python, which it does not while it
        # waits for a device. So a thread reads the number that the C handler writes here.
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        threading.Thread(
            target=stop._listen, args=(reading, writing), daemon=True, name="SIGTERM"
        ).start()
        return stop

    def requested(self, step: int) -> bool:
        """Whether the run shall save and stop now; once true it stays so.

        Cheap. Every process calls it once per update, alike.

        Args:
          step: the update just done, for the message.
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
        """Whether SIGTERM has come to a run of one process, so that waits should end at once.

        Never among several: the others are in an update already, which this one's data end, and
        nobody can save before that.
        """
        return self._in_loop and self._received > 0

    def _listen(self, reading: socket.socket, _writing: socket.socket) -> None:
        # Both ends are kept by this thread, or they would be closed when the caller returns.
        while numbers := reading.recv(64):
            for number in numbers:
                if number == signal.SIGTERM:
                    self._take()

    def _take(self) -> None:
        self._received += 1
        if self._received > 1:
            _say("a second SIGTERM: stopping at once")
            os._exit(_ENDED_BY_SIGTERM)
        if not self._in_loop:
            _say("SIGTERM before the first update: stopping, there is nothing to save")
            os._exit(PREEMPTED)
        _say("SIGTERM: saving and stopping after this update; a second one stops at once")


def _has_service() -> bool:
    """Whether jax.distributed is in charge of SIGTERM."""
    import jax

    return jax.distributed.is_initialized()


def _say(line: str) -> None:
    """One write, whatever the main thread is printing."""
    # It may be closed, or in use by the thread that was interrupted.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
    os.write(2, f"{line}\n".encode())
