"""SIGTERM, Ctrl-C and preemption notices: save after the current step, then exit.

Notices are SIGHUP (a terminal or SSH session closed), SIGUSR1 and SIGUSR2 (a scheduler's warning
before a time limit). Does not import JAX: the handler must be installed before JAX starts.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from MaxText.exit_codes import INTERRUPTED, PREEMPTED
from MaxText.program_start import NOTICES, STOP_SIGNALS
from MaxText.runtime import processes

_ENDED_BY_SIGTERM = 128 + signal.SIGTERM  # the shell's exit code of a process killed by SIGTERM


class PreemptionHandler:
    """Decides after each step, equally in all processes, whether to stop.

    A single process uses its own handler. Several use JAX's preemption service, which replaces it
    in jax.distributed; a notice to one makes all agree on a step at most a few later. Before the
    first call of `requested` there is nothing to save, so a signal exits at once (INTERRUPTED after
    Ctrl-C, else PREEMPTED). A second Ctrl-C or SIGTERM always does; SIGTERM then with 143. Notices
    never end a save: a closing terminal sends SIGHUP twice, and schedulers send SIGTERM after
    SIGUSR1. With several processes, Ctrl-C raises KeyboardInterrupt.
    """

    def __init__(self):
        self.exit_code = PREEMPTED
        self._received = 0  # requests to stop, of any kind
        self._demands = 0  # Ctrl-C and SIGTERM, of which the second ends the process
        self._in_loop = False
        self._calls = 0
        self._agreed = False
        self._several: bool | None = None  # whether JAX's service is in charge; None if unknown

    @classmethod
    def install(cls) -> "PreemptionHandler":
        """Handles STOP_SIGNALS and Ctrl-C unless the parent ignores them (nohup)."""
        handler = cls()
        handlers: dict[signal.Signals, Callable[..., None]] = {signal.SIGINT: handler._interrupt}
        handlers |= dict.fromkeys(STOP_SIGNALS, lambda *_: None)
        terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        # Here as well as in the thread: a write before the thread wakes up would fail with EIO.
        handlers[signal.SIGHUP] = lambda *_: _leave_closed_terminals(terminals)
        handled_signals = [
            number for number in handlers if signal.getsignal(number) is not signal.SIG_IGN
        ]
        if not handled_signals:
            return handler
        # Python handlers run only while the main thread executes Python, not while it waits for a
        # device. So a thread reads the signal number that the C handler writes here.
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        for number in handled_signals:
            signal.signal(number, handlers[number])
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(
            target=handler._listen, args=(receiver, sender, terminals), daemon=True, name="signals"
        ).start()
        return handler

    def requested(self, step: int) -> bool:
        """Returns whether to save and stop after `step`. Collective."""
        self._in_loop = True
        # Not `step`: the service compares call counts, and steps repeat after a rollback.
        self._calls += 1
        if self._several is None:
            import jax

            self._several = jax.distributed.is_initialized()
        if not self._several:
            return self._received > 0
        if self._agreed:
            return True
        from jax.experimental import multihost_utils

        if not multihost_utils.reached_preemption_sync_point(self._calls):
            return False
        self._agreed = True
        _say(f"SIGTERM or a preemption notice: all processes save and exit after step {step}")
        # JAX swallows every SIGTERM from its start on; a second one must end this process.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return True

    def request(self) -> None:
        """Requests a stop of all processes, from within one; `requested` then returns true."""
        if processes.count() > 1:
            if not self._agreed:
                os.kill(os.getpid(), signal.SIGTERM)
        elif not self._received:
            self._received = 1

    def is_pending(self) -> bool:
        """Returns whether a single process got SIGTERM, to end waits.

        Never true with several processes: the others already need this one's data for a step.
        """
        return self._in_loop and self._received > 0

    def _listen(
        self, receiver: socket.socket, _sender: socket.socket, terminals: list[int]
    ) -> None:
        # This thread holds both ends; otherwise they would be closed when the caller returns.
        while True:
            signal_numbers = receiver.recv(64)
            if not signal_numbers:
                return
            for number in signal_numbers:
                if number == signal.SIGHUP:
                    _leave_closed_terminals(terminals)
                if number in NOTICES:
                    self._take_notice(signal.Signals(number))
                elif number in (signal.SIGTERM, signal.SIGINT):
                    self._take_demand(number)

    def _take_notice(self, number: signal.Signals) -> None:
        """Requests a stop unless one is requested already."""
        if self._received:
            return
        if processes.count() > 1:
            # JAX's preemption service, which makes all processes agree on a step, knows SIGTERM.
            self.request()
            return
        self._received += 1
        if not self._in_loop:
            _say(f"{number.name} before the first step: exiting, there is nothing to save")
            os._exit(self.exit_code)
        _say(f"{number.name}: saving at the end of this step, then exiting")

    def _take_demand(self, number: int) -> None:
        by_user = number == signal.SIGINT
        name = "Ctrl-C" if by_user else "SIGTERM"
        is_first = self._received == 0
        self._received += 1
        self._demands += 1
        if self._demands > 1:
            _say(f"second {name}: exiting now")
            os._exit(INTERRUPTED if by_user else _ENDED_BY_SIGTERM)
        if by_user and is_first:
            self.exit_code = INTERRUPTED
        if not self._in_loop:
            _say(f"{name} before the first step: exiting, there is nothing to save")
            os._exit(self.exit_code)
        elif by_user and self._several:
            _say("Ctrl-C: exiting without saving; with several processes, send SIGTERM to save")
        else:
            _say(f"{name}: saving at the end of this step, then exiting; send it again to exit now")

    def _interrupt(self, *_: object) -> None:
        if self._several:
            raise KeyboardInterrupt

    def summary(self, saved_step: int | None, run_name: str) -> str:
        """Returns the last line of a stopped run: what was saved and how to resume."""
        cause = "Interrupted" if self.exit_code == INTERRUPTED else "Preempted"
        if saved_step is None:
            return f"{cause}. No checkpoint was saved."
        return (
            f"{cause}. Saved: step {saved_step}. Run the same command with run_name={run_name} to "
            "resume."
        )


def _leave_closed_terminals(terminals: list[int]) -> None:
    """Sends the output of a closed terminal to os.devnull, where a write does not fail."""
    for descriptor in terminals:
        if not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _say(line: str) -> None:
    """Writes in one system call, unmixed with the main thread's lines."""
    # stdout may be closed, or in use by the interrupted thread.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
