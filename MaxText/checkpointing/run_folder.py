"""Creates a run folder and checks that it is writable."""

import errno
import sys
import threading
import uuid

from etils import epath

from MaxText.errors import UserError
from MaxText.storage.bucket_errors import is_outage
from MaxText.storage.paths import is_bucket, path_of

_SILENCE_SECONDS = 3.0


def prepare_run_folder(path: str | epath.Path) -> epath.Path:
    """Creates the run folder, proves that it is writable, and returns its absolute path.

    Runs before anything expensive and before jax.distributed: each process writes its own probe
    file.
    """
    # Orbax requires absolute paths.
    folder = path_of(str(path), "base_output_directory")
    if not is_bucket(path):
        folder = folder.resolve()
    # The gs:// client retries for almost a minute before it reports an error.
    line = f"waiting for an answer of {folder} (base_output_directory), for up to a minute\n"
    waiting = threading.Timer(_SILENCE_SECONDS, lambda: sys.stderr.write(line))
    waiting.start()
    try:
        probe(folder)
    except OSError as error:
        remedy = "Choose another base_output_directory (or run_name)"
        remedy += ", or free space there." if error.errno == errno.ENOSPC else "."
        if is_bucket(path):
            remedy += " Is the bucket's name right, and does this machine reach it?"
        if is_outage(error):
            remedy = "Start the same command again when it answers."
        raise UserError(f"cannot write to the run folder {folder}: {error}. {remedy}") from error
    finally:
        waiting.cancel()
    return folder


def probe(folder: epath.Path) -> None:
    """Creates a folder and a probe file in it; raises OSError on failure."""
    probe = folder / f".writeprobe_{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("can this folder be written to?")
        probe.unlink()
    except OSError:
        raise
    except Exception as error:  # from the library behind a URL
        raise OSError(str(error)) from error
