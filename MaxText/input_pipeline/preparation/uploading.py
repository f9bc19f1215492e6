"""Prepares datasets in buckets: staged locally, then uploaded, the manifest last."""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from MaxText.config.data_sections import Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.corpus import open_corpus
from MaxText.input_pipeline.local_cache import copied_folder
from MaxText.input_pipeline.preparation.prepare import (
    digest_path_of,
    keep,
    manifest_name_of,
    prepare,
)
from MaxText.input_pipeline.token_store.manifest import Manifest
from MaxText.storage.atomic import lock
from MaxText.storage.file_access import file_system, path_type


def prepare_in_bucket(
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
    place = cache_dir / "prepared" / hashlib.sha256(url.encode()).hexdigest()[:24]
    with _held(place, cache_dir, show):
        if path_type(f"{url}/{name}"):
            kept = copied_folder(url, cache_dir)
            assert kept is not None, url
            source, field = preparation.prepare_source, preparation.text_field
            corpus = open_corpus(source, field, max_bad_records=max_bad_records)
            digest_path = digest_path_of(corpus, cache_dir)
            return keep(preparation, corpus, kept, digest_path, show, place=url)
        folder = place / "data_set"
        manifest = prepare(preparation, str(folder), show, max_bad_records=max_bad_records)
        _upload(folder, url, name)
        shutil.rmtree(place, ignore_errors=True)
        show(f"Uploaded it to {url}")
        return manifest


@contextlib.contextmanager
def _held(place: Path, cache_dir: Path, show: Callable[[str], None]) -> Iterator[None]:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        # Only errors of taking the lock are about the folder.
        held = contextlib.ExitStack()
        held.enter_context(lock(place.with_suffix(".lock"), show))
    except OSError as error:
        raise UserError(
            f"data_cache_dir={cache_dir} cannot be written ({error.strerror or error}). Set "
            "data_cache_dir to a folder on a disk with room."
        ) from error
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
                f"dataset_path={url}: another machine has made a data set there meanwhile. The "
                "same command compares it with what is asked for."
            )
        if others:
            raise UserError(
                f"dataset_path={url} has other files ({min(others)}) and is no data set of the "
                "kind that is asked for. Choose another folder, or delete them."
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
        f"dataset_path={url} cannot be written ({error}). What is finished is kept in {folder}: "
        "the same command uploads it."
    )
