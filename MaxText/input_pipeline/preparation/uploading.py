"""Prepares datasets in buckets: staged locally, then uploaded, the manifest last."""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from MaxText.config.data_sections import Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.local_cache import cache_write_error, copy_folder
from MaxText.input_pipeline.preparation.prepare import (
    PrepareRequest,
    check_existing,
    digest_path_of,
    manifest_name_of,
    prepare,
)
from MaxText.input_pipeline.token_store.manifest import Manifest
from MaxText.storage.atomic import lock
from MaxText.storage.file_access import file_system, path_type


def prepare_and_upload(
    preparation: Preparation,
    url: str,
    cache_dir: Path,
    show: Callable[[str], None],
    max_bad_records: int = 0,
) -> Manifest:
    """Prepares the dataset at `url`, or keeps it if it already matches the request.

    Readers recognize a dataset by its manifest, which is uploaded last. Several machines may
    prepare the same one concurrently: they write the same bytes. Raises UserError as `prepare`
    does, if other files are there, or if the bucket cannot be written.
    """
    url = url.rstrip("/")
    name = manifest_name_of(preparation)
    staging = cache_dir / "prepared" / hashlib.sha256(url.encode()).hexdigest()[:24]
    with _held(staging, cache_dir, show):
        if path_type(f"{url}/{name}"):
            kept = copy_folder(url, cache_dir)
            assert kept is not None, url
            request = PrepareRequest.of(preparation, max_bad_records, show)
            digest_path = digest_path_of(request.corpus, cache_dir)
            return check_existing(request, kept, digest_path, location=url)
        folder = staging / "data_set"
        manifest = prepare(preparation, str(folder), show, max_bad_records=max_bad_records)
        _upload(folder, url, name)
        shutil.rmtree(staging, ignore_errors=True)
        show(f"Uploaded it to {url}")
        return manifest


@contextlib.contextmanager
def _held(staging: Path, cache_dir: Path, show: Callable[[str], None]) -> Iterator[None]:
    try:
        staging.parent.mkdir(parents=True, exist_ok=True)
        # Only errors of taking the lock are about the folder.
        held = contextlib.ExitStack()
        held.enter_context(lock(staging.with_suffix(".lock"), show))
    except OSError as error:
        raise cache_write_error(cache_dir, error) from error
    with held:
        yield


def _upload(folder: Path, url: str, last: str) -> None:
    """Uploads all files of a folder, with `last` as the last one."""
    files = sorted(
        (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
        key=lambda file: (file == last, file),
    )
    system, path = file_system(url)
    try:
        others = {name[len(path) + 1 :] for name in system.find(path)} - {*files}
        if system.exists(f"{path}/{last}"):
            raise UserError(
                f"dataset_path={url}: another machine wrote a data set there meanwhile. Run the "
                "same command to compare it with the request."
            )
        if others:
            raise UserError(
                f"dataset_path={url} has other files ({min(others)}) and is not a data set of the "
                "requested kind. Choose another folder, or delete them."
            )
        for file in files:
            system.put_file(str(folder / file), f"{path}/{file}")
    except UserError as error:
        if not isinstance(error, OSError):
            raise
        raise _unwritable(folder, url, error) from error
    except Exception as error:  # fsspec backends raise their own errors
        raise _unwritable(folder, url, error) from error


def _unwritable(folder: Path, url: str, error: Exception) -> UserError:
    return UserError(
        f"dataset_path={url} cannot be written ({error}). The data set is kept in {folder}: run "
        "the same command to upload it."
    )
