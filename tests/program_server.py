"""Runs the programs in forks of a process that has imported everything once.

Tests start train.py dozens of times, and importing jax, Orbax and Grain takes 4 seconds each time.
`python -m tests.program_server DESCRIPTOR` imports them, then reads requests from a Unix socket.
Each fork is a process of its own: environment, working directory, signals, exit code and open files
are those of a program that was started normally. tests/programs.py is the other side.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
import warnings

# Packages that read the environment when they are imported (wandb, huggingface_hub) are skipped.
_LIBRARIES = (
    "jax.experimental.pallas",
    "flax.nnx",
    "optax",
    "orbax.checkpoint",
    "grain",
    "tensorboardX",
    "tokenizers",
    "tiktoken",
    "safetensors.numpy",
    "scipy.stats",
    "matplotlib.figure",
    "zstandard",
)
_PACKAGES = ("layers", "parallelism", "training", "checkpointing", "input_pipeline", "monitoring")


def preload() -> None:
    """Imports the libraries and the packages of MaxText that every program imports."""
    warnings.simplefilter("ignore")
    for name in _LIBRARIES:
        importlib.import_module(name)
    import MaxText

    for package in _PACKAGES:
        paths = [f"{path}/{package}" for path in MaxText.__path__]
        for module in pkgutil.walk_packages(paths, f"MaxText.{package}."):
            importlib.import_module(module.name)
    warnings.resetwarnings()
    # A fork that looks at these objects at its end takes a second longer.
    gc.collect()
    gc.freeze()


def serve(control: socket.socket) -> dict | None:
    """Forks for each request; returns the request in the child and None once `control` closes."""
    answers: dict[int, int] = {}  # process id -> descriptor to write its exit code to
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(reading, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == reading:
                os.read(reading, 4096)
                continue
            text, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
            if not text:
                for pid in answers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return None
            *standard, answer = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, descriptor in enumerate(standard):
                    os.dup2(descriptor, number)
                for descriptor in [*descriptors, *answers.values(), reading, writing]:
                    os.close(descriptor)
                selector.close()
                control.close()
                return json.loads(text)
            os.write(answer, f"{pid}\n".encode())
            answers[pid] = answer
            for descriptor in standard:
                os.close(descriptor)
        for pid in list(answers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(BrokenPipeError):  # no process waits for it
                    os.write(answers[pid], f"{os.waitstatus_to_exitcode(status)}\n".encode())
                os.close(answers.pop(pid))


def become(request: dict) -> None:
    """Runs the program of a request in this process, as the interpreter would."""
    from MaxText import program_start
    from MaxText.compilation import compilation_cache

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # Those of the server know other files, which may have had a position.
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=unbuffered)
    sys.stderr.reconfigure(line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    ignored = request["ignores_ctrl_c"]  # by the caller; the server may have started otherwise
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    importlib.reload(program_start)  # reads the time
    compilation_cache._SHORTEST_KEPT = 0.0
    first, *rest = request["arguments"]
    if first == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.path[0], sys.argv = os.getcwd(), rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(first)), [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    preload()
    # What the interpreter does at its end (threads, atexit, exit code) is done by the child, too.
    if (asked := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        become(asked)
