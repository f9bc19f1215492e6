"""SIGTERM, Ctrl-C, and notices that this machine goes away: save at the end of a step and stop.

Imports no jax: the handler must be in place before jax starts.
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

    The first signal before the first call of `requested` ends the process with `exit_code`: there
    is nothing to save yet. So does a second one at any time, at once; SIGTERM then with 143. In a
    run of several processes Ctrl-C is a KeyboardInterrupt.

    Attributes:
      exit_code: exit_codes.INTERRUPTED after Ctrl-C, else exit_codes.PREEMPTED.
    """

    def __init__(self):
        """Use `install`."""
        self.exit_code = PREEMPTED
        self._received = 0
        self._in_loop = False
        self._calls = 0
        self._agreed = False
        self._several: bool | None = None  # whether jax's service is in charge; unknown at first

    @classmethod
    def install(cls) -> "StopSignal":
        """Takes over SIGTERM and Ctrl-C, except those that whoever started us ignores.

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
        """Python's handler of Ctrl-C; `_take` has heard of it too."""
        if self._several:
            raise KeyboardInterrupt

    def summary(self, saved: int | None, run_name: str) -> str:
        """Says what is saved and how to resume.

        Args:
          saved: step of the newest checkpoint; None without any.
        """
        how = "Interrupted" if self.exit_code == INTERRUPTED else "Preempted"
        if saved is None:
            return f"{how}. No checkpoint was saved."
        return (
            f"{how}. Saved: step {saved}. Run the same command with run_name={run_name} to resume."
        )


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
