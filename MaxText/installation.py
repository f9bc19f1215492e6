"""Checks that this Python has what the package needs, with one line instead of a traceback.

Runs in any Python 3.6 or newer, before anything that such a Python cannot read. So this file has no
annotations that it would have to evaluate, and no newer syntax.
"""

import importlib.util
import os
import sys

OLDEST_PYTHON = (3, 11)
# Top-level modules of the dependencies without which no program starts.
REQUIRED_MODULES = (
    "etils",
    "filelock",
    "flax",
    "fsspec",
    "google_crc32c",
    "grain",
    "jax",
    "jinja2",
    "matplotlib",
    "numpy",
    "optax",
    "orbax",
    "plotly",
    "pydantic",
    "regex",
    "safetensors",
    "scipy",
    "tensorboardX",
    "tiktoken",
    "tokenizers",
    "yaml",
    "zstandard",
)


def problem():
    """Returns why this Python cannot run the package, with the remedy; empty if it can."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        reason = f"needs Python {oldest} or newer"
        remedy = "Run bash setup.sh in the clone, which finds a newer one; use .venv/bin/python."
    else:
        missing = [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]
        if not missing:
            return ""
        named = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        reason = f"is not installed in this Python: {named} missing"
        remedy = "Run bash setup.sh in the clone and use .venv/bin/python, or pip install it here."
    clone = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    prepared = os.path.join(clone, ".venv", "bin", "python")
    if os.path.exists(prepared) and prepared != sys.executable:
        remedy = f"Use {prepared}, or source {os.path.dirname(prepared)}/activate."
    return f"jaxpretrain {reason}. This is {sys.executable} {version}. {remedy}"


def check():
    """Ends a program with one line, or an import with ImportError, if there is a `problem`."""
    message = problem()
    if not message:
        return
    if _is_program():
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(2)
    raise ImportError(message)


def _is_program():
    """Returns whether one of the programs was started, as a file, by -m or by its command."""
    name = sys.argv[0] if sys.argv else ""
    folder = os.path.dirname(os.path.abspath(__file__))
    is_file = os.path.dirname(os.path.abspath(name)) == folder and name.endswith(".py")
    return is_file or name == "-m" or os.path.basename(name).startswith("maxtext-")
