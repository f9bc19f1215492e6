"""File format of a compiled step, from train_compile.py to train.py.

Loading one executes its contents: machine code and JAX's pickle around it. So nothing is unpickled
before the signature is verified, an HMAC-SHA256 under the user's key: anybody could compute a mere
checksum. The file:

    MaxText compiled step 1       a line
    signature                     a line, hexadecimal, of all that follows
    facts                         a line of JSON: what it was compiled for and from
    executable                    the rest
"""

import hashlib
import hmac
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Mapping
from typing import Any

from MaxText.errors import UserError
from MaxText.storage.atomic import atomic_write_bytes
from MaxText.storage.paths import is_object_store_path, parse_path

_FIRST_LINE = b"MaxText compiled step 1\n"
_KEY_BYTES = 32

KEY_VARIABLE = "MAXTEXT_SIGNING_KEY_FILE"


def key_file() -> pathlib.Path:
    """Returns the signing key's path, by default ~/.maxtext/signing_key."""
    return pathlib.Path(os.environ.get(KEY_VARIABLE) or "~/.maxtext/signing_key").expanduser()


def write(path: str, facts: Mapping[str, Any], executable: bytes) -> str:
    """Signs and atomically writes a file; returns the signature."""
    key = _read_key(may_make=True)
    content = json.dumps(facts, sort_keys=True).encode() + b"\n" + executable
    signature = _sign(key, content)
    file = parse_path(path, "compiled_trainstep_file")
    whole = _FIRST_LINE + signature.encode() + b"\n" + content
    try:
        if not is_object_store_path(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(file, whole)
    except OSError as error:
        raise UserError(f"compiled_trainstep_file={path}: cannot write it ({error})") from error
    return signature


def read(path: str) -> tuple[dict[str, Any], bytes]:
    """Returns (facts, executable) of a verified file; else UserError."""
    try:
        content = parse_path(path, "compiled_trainstep_file").read_bytes()
    except FileNotFoundError as error:
        raise UserError(
            f"compiled_trainstep_file={path}: no such file. Create it by train_compile.py with the "
            "same configuration and compile_topology, or remove the key."
        ) from error
    except OSError as error:
        raise UserError(f"compiled_trainstep_file={path}: cannot read it ({error})") from error
    refused = f"compiled_trainstep_file={path} is rejected, and none of it was executed:"
    first, _, rest = content.partition(b"\n")
    if first + b"\n" != _FIRST_LINE:
        raise UserError(f"{refused} it is not a file of this version's train_compile.py.")
    signature, _, signed = rest.partition(b"\n")
    key = _read_key(may_make=False)
    if not hmac.compare_digest(_sign(key, signed).encode(), signature):
        raise UserError(
            f"{refused} invalid signature for key {key_file()}: the file is corrupted, was "
            "modified, or was signed with another key.\n"
            "  What to do: compile it again, or copy the key of the machine that compiled it; "
            f"{KEY_VARIABLE} is the path of the key."
        )
    facts, _, executable = signed.partition(b"\n")
    return json.loads(facts), executable


def _sign(key: bytes, content: bytes) -> str:
    return hmac.new(key, _FIRST_LINE + content, hashlib.sha256).hexdigest()


def _read_key(may_make: bool) -> bytes:
    file = key_file()
    if may_make and not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # Never readable by others, and never overwrites another process's key.
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as opened:
                opened.write(secrets.token_hex(_KEY_BYTES) + "\n")
        except FileExistsError:
            pass
        except OSError as error:
            raise UserError(f"cannot create the signing key {file} ({error})") from error
    try:
        mode = file.stat().st_mode
        key = file.read_bytes().strip()
    except OSError as error:
        raise UserError(
            f"no key to verify compiled_trainstep_file: {file} ({error}).\n"
            "  What to do: copy that file from the machine that compiled, with its permissions, or "
            f"set {KEY_VARIABLE} to its path."
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"other users can access the signing key {file}, and could sign anything with it. Run: "
            f"chmod 600 {file}"
        )
    if len(key) < _KEY_BYTES:
        raise UserError(f"the signing key {file} is shorter than {_KEY_BYTES} bytes")
    return key
