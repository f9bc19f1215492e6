"""What a candidate's code may not do in the process that trains or measures it.

Two means, both of CPython alone. An audit hook (PEP 578) refuses files, processes and connections
to code that a candidate's source file is on the stack of. A fingerprint of the functions of this
package, JAX and NumPy, taken before the candidate is imported and compared afterwards, finds
functions that were replaced.

Neither is a sandbox: code that means to escape can (docs/explanation/arena.md).
"""

import importlib
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import MaxText
from MaxText.errors import UserError

PACKAGE = Path(MaxText.__file__).resolve().parent
# Libraries whose functions a measurement depends on.
_ROOTS = frozenset({"MaxText", "builtins", "flax", "grain", "jax", "math", "numpy", "optax"})
# Modules of the package whose classes' methods are part of the fingerprint as well.
_OWN_ROOT = "MaxText"
_METHODS = (FunctionType, staticmethod, classmethod, property)
_MAX_WRAPPERS = 8
_MOST_NAMED = 3  # of replaced functions, in a message
# Modules of JAX that read and write compiled programs while a candidate's code is traced.
_COMPILATION_CACHE = ("jax/_src/compilation_cache.py", "jax/_src/lru_cache.py")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events that a model has no use for, and what they are.
_REFUSED_EVENTS = {
    "os.exec": "started a program",
    "os.fork": "started a process",
    "os.forkpty": "started a process",
    "os.link": "wrote a file",
    "os.mkdir": "made a folder",
    "os.posix_spawn": "started a program",
    "os.remove": "deleted a file",
    "os.rename": "renamed a file",
    "os.rmdir": "deleted a folder",
    "os.symlink": "wrote a file",
    "os.system": "started a program",
    "os.truncate": "wrote a file",
    "socket.connect": "opened a connection",
    "socket.getaddrinfo": "looked up a host",
    "subprocess.Popen": "started a program",
    "sys.addaudithook": "installed an audit hook",
}


Report = Callable[[str], None]


class IsolationError(PermissionError):
    """A candidate's code did what `watch` refuses."""


class Watch:
    """Refuses files, processes and connections to the code of a candidate.

    That is code of source files that are neither installed nor trusted.

    Attributes:
      violations: What was refused, for a reason.
    """

    def __init__(self, trusted: Collection[str] = (), report: Report | None = None):
        """Watches from now on, until `stop`.

        Args:
          trusted: Source files of the session, such as those of its data. So are all files that
            are imported already.
          report: Called with each violation when it happens.
        """
        self.violations: list[str] = []
        self._report = report
        self._trusted = {*map(os.path.realpath, trusted), *source_files(), *_main_file()}
        self._is_candidates: dict[str, bool] = {}  # by file name of a code object
        devices = ("/dev", "/proc", "/sys")
        self._readable = (*_installed(), *map(_folder, devices))
        self._checking = threading.local()  # an event of a thread's own check is not looked at
        self._is_active = True  # a hook itself cannot be removed
        sys.addaudithook(self._on_event)

    def stop(self) -> None:
        """Refuses nothing from now on."""
        self._is_active = False

    def is_candidates(self, file: str) -> bool:
        """Returns whether a source file, as a code object names it, is the candidate's."""
        if file not in self._is_candidates:
            path = os.path.realpath(file)
            is_user = not file.startswith("<") and not path.startswith(_installed())
            self._is_candidates[file] = is_user and path not in self._trusted
        return self._is_candidates[file]

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raises IsolationError for a refused event below code of the candidate."""
        if not self._is_active or (event != "open" and event not in _REFUSED_EVENTS):
            return
        if getattr(self._checking, "active", False):
            return
        self._checking.active = True
        try:
            description = self._describe(event, arguments)
            source_line = self._place(sys._getframe(1)) if description else ""
        finally:
            self._checking.active = False
        if source_line:
            violation = f"it must compute, and do nothing else: {source_line} {description}"
            if violation not in self.violations:
                self.violations.append(violation)
                if self._report is not None:
                    self._report(violation)
            raise IsolationError(violation)

    def _describe(self, event: str, arguments: tuple[Any, ...]) -> str:
        """Returns what an event did; "" if it is allowed."""
        if event != "open":
            return _REFUSED_EVENTS[event]
        path, mode, flags = (*arguments, None, None, None)[:3]
        if not isinstance(path, str | bytes | os.PathLike):
            return ""  # an open descriptor
        name = os.path.realpath(os.fsdecode(path))
        if _is_writing(mode, flags):
            return f"opened {name} for writing"
        if name.endswith((".py", ".pyc")) or name.startswith(self._readable):
            return ""
        return f"opened the file {name}"

    def _place(self, frame: FrameType | None) -> str:
        """Returns "file:line" of the innermost frame of the candidate's code; "" without one."""
        while frame is not None:
            file = frame.f_code.co_filename
            if file.endswith(_COMPILATION_CACHE):
                return ""
            if self.is_candidates(file):
                return f"{Path(file).name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


def _installed() -> tuple[str, ...]:
    """Returns the folders of this package, of Python and of installed packages."""
    standard_library = os.path.dirname(os.__file__)
    return tuple(map(_folder, (PACKAGE, sys.prefix, sys.base_prefix, standard_library)))


def _main_file() -> list[str]:
    """Returns the source file of the running program, if it has one."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return [os.path.realpath(file)] if file else []


def _folder(path: object) -> str:
    """Returns a folder as the beginning of the paths inside of it."""
    return os.path.join(os.path.realpath(str(path)), "")


def _is_writing(mode: object, flags: object) -> bool:
    """Returns whether an audit event `open` is for writing."""
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & _WRITES)


class _Function(NamedTuple):
    """What a name of a module stands for."""

    value: Any  # the callable itself, so that its id is not given to another one
    codes: tuple[CodeType, ...]  # of the function, and of those that it wraps

    def is_same(self, other: "_Function") -> bool:
        """Returns whether two are the same object with the same code."""
        pairs = zip(self.codes, other.codes, strict=False)
        return (
            self.value is other.value
            and len(self.codes) == len(other.codes)
            and all(code is other_code for code, other_code in pairs)
        )


Fingerprint = Mapping[str, _Function]


def import_package() -> None:
    """Imports every module of this package, so that none is imported after a candidate."""
    for module in pkgutil.walk_packages([str(PACKAGE)], f"{MaxText.__name__}."):
        try:
            importlib.import_module(module.name)
        except (ImportError, UserError):
            continue  # needs an optional package that is not installed


def fingerprint() -> Fingerprint:
    """Returns the functions of the imported modules, and the methods of this package's classes."""
    functions: dict[str, _Function] = {}
    for module_name, module in list(sys.modules.items()):
        root = module_name.partition(".")[0]
        if root not in _ROOTS or module is None:
            continue
        for name, value in list(vars(module).items()):
            if not callable(value):
                continue
            functions[f"{module_name}.{name}"] = _function(value)
            if root == _OWN_ROOT and isinstance(value, type):
                for attribute, member in list(vars(value).items()):
                    if isinstance(member, _METHODS):
                        functions[f"{module_name}.{name}.{attribute}"] = _function(member)
    return functions


def _function(value: Any) -> _Function:
    """Returns a callable or a method with its code and that of the functions it wraps."""
    codes = []
    wrapped = value.fget if isinstance(value, property) else value
    if isinstance(value, staticmethod | classmethod):
        wrapped = value.__func__
    while wrapped is not None and len(codes) < _MAX_WRAPPERS:
        if isinstance(wrapped, FunctionType):
            codes.append(wrapped.__code__)
        try:
            # Not getattr, which runs code of objects such as pydantic's.
            wrapped = object.__getattribute__(wrapped, "__dict__").get("__wrapped__")
        except AttributeError:
            wrapped = None
    return _Function(value, tuple(codes))


def replaced_functions(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Returns the names of functions that are gone or another one now.

    Args:
      before: From before the candidate was imported.
      after: From after it ran. Names that are new are not looked at.
    """
    return [
        name
        for name, function in before.items()
        if name not in after or not function.is_same(after[name])
    ]


class Guard:
    """A fingerprint from before a candidate is imported, and a watch over its code.

    Attributes:
      watch: Refuses files, processes and connections to the candidate's code.
    """

    def __init__(self, trusted: Collection[str] = (), report: Report | None = None):
        """Imports this package, and begins.

        Args:
          trusted: As of Watch.
          report: As of Watch.
        """
        import_package()
        self._before = fingerprint()
        self.watch = Watch(trusted, report)

    def problems(self) -> list[str]:
        """Returns what the candidate's code has done since: reasons to refuse it."""
        problems = list(self.watch.violations)
        replaced = replaced_functions(self._before, fingerprint())
        if replaced:
            num_unnamed = len(replaced) - _MOST_NAMED
            others = f" and {num_unnamed} more" if num_unnamed > 0 else ""
            problems.append(
                f"it replaces functions of the program that trains and measures it: "
                f"{', '.join(replaced[:_MOST_NAMED])}{others}"
            )
        return problems


def source_files() -> list[str]:
    """Returns the imported source files that belong to neither Python, a library nor this package.

    Those are the files of the user's parts, and what they import.
    """
    files = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if module is None or not file or module.__name__ in ("__main__", "__mp_main__"):
            continue
        path = os.path.realpath(file)
        if not path.startswith(_installed()):
            files.add(path)
    return sorted(files)
