"""Turns text into a prepared data set, or into records for other programs: `prepare`.

A folder appears under its name only when it is complete: everything is written into the hidden
`.<name>.preparing` beside it, synced, and renamed at the end. A preparation that was killed goes on
from there when the same command runs again. Imports no jax.
"""

import contextlib
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from MaxText.configuration.data_sections import Data, Preparation
from MaxText.errors import UserError
from MaxText.input_pipeline.cores import num_cores
from MaxText.input_pipeline.document_sources.corpus import Corpus, open_corpus
from MaxText.input_pipeline.preparation import building_lock, work_processes
from MaxText.input_pipeline.preparation.building import (
    BYTES_READ_WORTH_A_PROCESS,
    Request,
    Workers,
    build_data_set,
)
from MaxText.input_pipeline.preparation.progress import show_progress
from MaxText.input_pipeline.preparation.record_export import (
    TEXT_FORMATS,
    damaged_files,
    export_records,
)
from MaxText.input_pipeline.preparation.survey import (
    SAMPLED_UNITS,
    SurveyJob,
    SurveySettings,
    UnitSurvey,
    corpus_digest,
    join_samples,
    sampling_jobs,
    survey_unit,
)
from MaxText.input_pipeline.preparation.unit_encoding import Recipe
from MaxText.input_pipeline.preparation.unwritable import cannot_write
from MaxText.input_pipeline.storage import file_infos, is_url, local_path
from MaxText.input_pipeline.sync import sync_file, write_whole
from MaxText.input_pipeline.token_store.manifest import (
    MANIFEST_NAME,
    Manifest,
    read_manifest,
)
from MaxText.input_pipeline.tokenization.loading import TextTokenizer, load_tokenizer
from MaxText.input_pipeline.tokenization.training import train_tokenizer

Show = Callable[[str], None]

_RECORD_FORMATS = ("tfrecord", "parquet", *TEXT_FORMATS)

# Of records for other programs: the manifest of the data set that they were made from.
_RECORDS_MANIFEST_NAME = "prepared_from.json"

# Text on which the engine that encodes is compared with the one that defines the ids.
_COMPARED_CHARACTERS = 500_000

# Keys whose change makes another data set. Sources and tokenizer are compared by content instead.
_OPTIONS = (
    "tokenizer_vocab_size",
    "tokenizer_special_tokens",
    "add_bos",
    "add_eos",
    "validation_fraction",
    "prepare_seed",
    "prepare_fix_text",
    "prepare_minimum_tokens",
    "prepare_separator_id",
    "prepare_output_format",
)
_OPTIONS_OF_IDS = ("add_bos", "add_eos", "prepare_minimum_tokens", "prepare_separator_id")
_OPTIONS_OF_TRAINED_TOKENIZERS = ("tokenizer_vocab_size", "tokenizer_special_tokens")
_OPTIONS_OF_RECORDS = (
    "prepare_record",
    "prepare_field",
    "prepare_chunk_length",
    "prepare_num_shards",
    "prepare_name",
    "prep_min_length",
    "prep_max_length",
    "prep_stride",
    "prep_ignore_label",
)
# Who does the work shows nowhere in a data set, its manifest included.
_NOT_OF_THE_DATA = {"prepare_num_workers", "prepare_runner", "beam_options"}


def prepare(
    preparation: Preparation,
    dataset_path: str,
    show: Show = print,
    *,
    cache_dir: str | None = None,
    max_bad_records: int = 0,
) -> Manifest:
    """Makes the data set `dataset_path`, or keeps it when it is already what is asked for.

    When another process makes it just now, waits and keeps what that one made.

    Args:
      preparation: the keys about preparation.
      dataset_path: folder to make, local or a URL.
      show: takes lines about what was done.
      cache_dir: data_cache_dir: where a data set that goes to a bucket is made first (None for its
        default), and digests of texts are kept (None keeps none).
      max_bad_records: bad rows and files of the text that are left out and counted.

    Returns:
      The manifest of the data set, or of the one that records were made from.

    Raises:
      UserError: no readable text, an unusable tokenizer, or a folder in the way.
    """
    if not dataset_path:
        raise UserError("dataset_path is not set: give the folder to write the data set to.")
    if is_url(dataset_path):
        from MaxText.input_pipeline.preparation.uploading import prepare_in_bucket

        place = Path(cache_dir or Data().data_cache_dir).expanduser()
        return prepare_in_bucket(preparation, dataset_path, place, show, max_bad_records)
    folder = Path(local_path(dataset_path))
    source, field = preparation.prepare_source, preparation.text_field
    corpus = open_corpus(source, field, max_bad_records=max_bad_records)
    manifest_name = manifest_name_of(preparation)
    digest_path = digest_path_of(corpus, cache_dir)

    def keep_it() -> Manifest:
        place = str(folder)
        return keep(preparation, corpus, folder, manifest_name, digest_path, show, place=place)

    if (folder / manifest_name).exists():
        # Without the lock: the folder may be read-only.
        return keep_it()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"dataset_path={dataset_path} exists and is no data set of the kind that is asked for. "
            "Choose another folder, or delete it."
        )
    manifest = make_once(preparation, corpus, folder, manifest_name, keep_it, show)
    _note_digest(digest_path, manifest.source.sha256)
    return manifest


def manifest_name_of(preparation: Preparation) -> str:
    """The file that makes a folder what is asked for."""
    is_records = preparation.prepare_output_format in _RECORD_FORMATS
    return _RECORDS_MANIFEST_NAME if is_records else MANIFEST_NAME


def make_once(
    preparation: Preparation,
    corpus: Corpus,
    folder: Path,
    manifest_name: str,
    keep: Callable[[], Manifest],
    show: Show,
) -> Manifest:
    """Makes a data set, or waits for another process that makes it.

    Args:
      preparation: the keys about preparation.
      corpus: the text.
      folder: to make; empty if it exists.
      manifest_name: of the file in it by which it is known to be complete.
      keep: called instead where it is complete once nobody else works on it.
      show: takes lines about what was done.

    Returns:
      Its manifest, or what `keep` gives.

    Raises:
      UserError: as `prepare`.
    """
    building = folder.with_name(f".{folder.name}.preparing")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with building_lock.hold(folder.with_name(f".{folder.name}.lock"), show):
            if (folder / manifest_name).exists():
                # Left by a process that was killed after giving the folder its name.
                shutil.rmtree(building, ignore_errors=True)
                return keep()
            try:
                manifest = _make(preparation, corpus, building, show)
                _finish(building, preparation, folder, show)
            except BaseException as error:
                if not any((building / "parts").glob("*.json")):
                    shutil.rmtree(building, ignore_errors=True)
                elif building.exists():
                    first = "mend that, then " if isinstance(error, UserError) else ""
                    show(
                        f"Finished parts are kept in {building}: {first}run the same command again"
                    )
                raise
    except OSError as error:
        # Readers name what is wrong with the text, so this is about the folder.
        raise cannot_write(folder, error) from error
    show(f"Wrote {folder}")
    return manifest


def _make(preparation: Preparation, corpus: Corpus, building: Path, show: Show) -> Manifest:
    """Builds the data set in `building`."""
    num_processes = preparation.prepare_num_workers or num_cores()
    is_beam = preparation.prepare_runner == "beam"
    workers = Workers(num_processes, preparation.beam_options if is_beam else None)
    tokenizer, surveys = _tokenizer(preparation, corpus, workers, show)
    is_text = _is_text(preparation)
    before, after = ((), ()) if is_text else _control_ids(preparation, tokenizer)
    is_array_record = preparation.prepare_output_format == "array_record"
    request = Request(
        corpus=corpus,
        recipe=Recipe(
            tokenizer=tokenizer,
            before=before,
            after=after,
            seed=preparation.prepare_seed,
            validation_fraction=preparation.validation_fraction,
            fix_text=preparation.prepare_fix_text,
            minimum_tokens=0 if is_text else preparation.prepare_minimum_tokens,
            is_text=is_text,
        ),
        file_format="array_record" if is_array_record else "bin",
        options=_options(preparation),
        expected_sha256={survey.number: survey.sha256 for survey in surveys},
    )
    return build_data_set(building, request, workers, show)


def _finish(building: Path, preparation: Preparation, folder: Path, show: Show) -> None:
    """Gives the complete data set, or the records made from it, their final name."""
    complete = building / "data_set"
    if preparation.prepare_output_format in _RECORD_FORMATS:
        records = building / "records"
        _open_records(records, complete, preparation)
        export_records(complete, preparation, records, show)
        shutil.copyfile(complete / MANIFEST_NAME, records / _RECORDS_MANIFEST_NAME)
        sync_file(records / _RECORDS_MANIFEST_NAME)
        sync_file(records)
        complete = records
    complete.rename(folder)
    sync_file(folder.parent)
    shutil.rmtree(building, ignore_errors=True)


def _open_records(records: Path, complete: Path, preparation: Preparation) -> None:
    """Deletes what a stopped preparation wrote of records that differ from what is asked for."""
    request = records.with_name("records_request.json")
    asked = {
        "options": preparation.model_dump(mode="json", include={*_OPTIONS_OF_RECORDS}),
        "data set": read_manifest(str(complete)).fingerprint,
        "format": preparation.prepare_output_format,
    }
    text = json.dumps(asked, indent=1, sort_keys=True) + "\n"
    if not request.exists() or request.read_text(encoding="utf-8") != text:
        shutil.rmtree(records, ignore_errors=True)
        write_whole(request, text)


def _tokenizer(
    preparation: Preparation, corpus: Corpus, workers: Workers, show: Show
) -> tuple[TextTokenizer, list[UnitSurvey]]:
    """The tokenizer to use, and what was read of the corpus to train it."""
    if _is_trained(preparation):
        surveys, sample = _sample(preparation, corpus, workers, show)
        tokenizer = _train(preparation, sample, show)
    else:
        tokenizer = _given_tokenizer(preparation)
        surveys, sample = [], _first_texts(corpus)
    fast = tokenizer.engine
    if not tokenizer.check_engine(sample):
        show(f"{fast} gives other ids on this text: encoding with {tokenizer.engine}, slower")
    return tokenizer, surveys


def _is_text(preparation: Preparation) -> bool:
    return preparation.prepare_output_format in TEXT_FORMATS


def _is_trained(preparation: Preparation) -> bool:
    is_given = preparation.tokenizer_path or preparation.tokenizer_type == "byte"
    return not is_given and not _is_text(preparation)


def _given_tokenizer(preparation: Preparation) -> TextTokenizer:
    if _is_text(preparation):
        return load_tokenizer("", "byte")
    return load_tokenizer(preparation.tokenizer_path, preparation.tokenizer_type)


def _first_texts(corpus: Corpus) -> list[str]:
    """About _COMPARED_CHARACTERS of text from the beginning."""
    texts: list[str] = []
    left = _COMPARED_CHARACTERS
    for unit in corpus.shards:
        for document in unit.documents(Counter()):
            texts.append(document.text)
            left -= len(document.text)
            if left <= 0:
                return texts
    return texts


def _sample(
    preparation: Preparation, corpus: Corpus, workers: Workers, show: Show
) -> tuple[list[UnitSurvey], tuple[str, ...]]:
    """Texts to train a tokenizer on, and the survey of the units that they are from."""
    seed = preparation.prepare_seed
    most_units = SAMPLED_UNITS
    while True:
        jobs = sampling_jobs(corpus, seed, most_units=most_units)
        surveys = _survey(preparation, corpus, jobs, workers, show)
        fraction = 0.0 if corpus.splits else preparation.validation_fraction
        sample = join_samples(surveys, seed, fraction)
        if sample or most_units >= len(corpus.shards):
            return surveys, sample
        # The units drawn are empty; others may not be.
        most_units = len(corpus.shards)


def _survey(
    preparation: Preparation, corpus: Corpus, jobs: list[SurveyJob], workers: Workers, show: Show
) -> list[UnitSurvey]:
    """Reads units in processes; their surveys in order."""
    num_bytes = sum(job.unit.num_bytes for job in jobs)
    num_processes, _ = workers.for_corpus(corpus, BYTES_READ_WORTH_A_PROCESS)
    settings = SurveySettings(preparation.prepare_seed, preparation.prepare_fix_text)
    with show_progress("Reading", num_bytes, show) as advance:
        surveys = work_processes.run(survey_unit, settings, jobs, num_processes, advance)
        return sorted(surveys, key=lambda survey: survey.number)


def _train(preparation: Preparation, sample: Sequence[str], show: Show) -> TextTokenizer:
    start = time.monotonic()
    sample_bytes = sum(len(text.encode()) for text in sample)
    origin = f"byte-level BPE trained on {sample_bytes / 1e6:.1f} MB of this text"
    tokenizer = train_tokenizer(
        sample,
        preparation.tokenizer_vocab_size,
        origin,
        preparation.tokenizer_special_tokens,
    )
    show(
        f"Tokenizer: {tokenizer.entry.vocab_size} ids, {origin} in {time.monotonic() - start:.1f} s"
    )
    return tokenizer


def _control_ids(
    preparation: Preparation, tokenizer: TextTokenizer
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before and after each document."""
    entry = tokenizer.entry
    separator = preparation.prepare_separator_id
    if separator >= entry.vocab_size:
        raise UserError(
            f"prepare_separator_id={separator} is not below {entry.vocab_size}, the ids of the "
            f"tokenizer ({entry.origin}). Give one of its ids, or -1 for its end of text."
        )
    if separator >= 0 and not preparation.add_eos:
        raise UserError(
            f"prepare_separator_id={separator} has no effect with add_eos=false, which ends "
            "documents with no id. Leave one of them out."
        )
    for key, wanted, control in (
        ("add_eos", preparation.add_eos and separator < 0, entry.eos_id),
        ("add_bos", preparation.add_bos, entry.bos_id),
    ):
        if wanted and control is None:
            which = key.removeprefix("add_")
            raise UserError(
                f"{key}=true, and the tokenizer ({entry.origin}) names no {which} token. Put a "
                f'tokenizer_config.json with "{which}_token" beside its file, or set {key}=false.'
            )
    before = (entry.bos_id,) if preparation.add_bos and entry.bos_id is not None else ()
    end = entry.eos_id if separator < 0 else separator
    after = (end,) if preparation.add_eos and end is not None else ()
    return before, after


def keep(
    preparation: Preparation,
    corpus: Corpus,
    folder: Path,
    manifest_name: str,
    digest_path: Path | None,
    show: Show,
    *,
    place: str,
) -> Manifest:
    """The manifest that is there, if it is of the same text, tokenizer and options.

    Args:
      preparation: the keys about preparation.
      corpus: the text.
      folder: that holds the manifest.
      manifest_name: of its file.
      digest_path: where the digest of the text is kept, see `digest_path_of`.
      show: told that the data set is kept.
      place: of the data set, for messages.

    Raises:
      UserError: it is of something else; says what.
    """
    manifest = read_manifest(str(folder), manifest_name)
    differences = _different_options(preparation, manifest)
    if _is_trained(preparation):
        was = manifest.options
        same = not was.get("tokenizer_path") and was.get("tokenizer_type") != "byte"
    else:
        tokenizer = _given_tokenizer(preparation)
        same = tokenizer.entry.sha256 == manifest.tokenizer.sha256
    if not same:
        differences.append(f"its tokenizer was other ({manifest.tokenizer.origin})")
    if not differences and preparation.prepare_output_format in _RECORD_FORMATS:
        damaged = damaged_files(folder, preparation.prepare_output_format)
        differences += [f"{name} is missing or cut short" for name in damaged[:1]]
    # Reading all text is for the case that nothing else differs and its files were never read.
    if not differences:
        sha256 = _kept_digest(digest_path) or _text_sha256(preparation, corpus, show)
        _note_digest(digest_path, sha256)
        if sha256 != manifest.source.sha256:
            differences.append(f"its text was other ({manifest.source.description})")
    if differences:
        raise UserError(
            f"dataset_path={place} holds another data set: {'; '.join(differences)}. Choose "
            "another folder, or delete it to prepare it again."
        )
    show(f"Kept {place}: it already holds this text with these options")
    return manifest


def digest_path_of(corpus: Corpus, cache_dir: str | Path | None) -> Path | None:
    """Where the digest of a corpus is kept once its text was read.

    The name says which files it is of, with their sizes and times, so a file that was edited gets
    another one. None where a file system tells no times, or nothing is to be kept.
    """
    ranges = [part for shard in corpus.shards for part in shard.ranges]
    if cache_dir is None:
        return None
    files = file_infos(list(dict.fromkeys(part.file.path for part in ranges)))
    if not all(file.tag for file in files):
        return None
    first = corpus.shards[0]
    read = [[part.file.path, part.start, part.stop] for part in ranges]
    decisive = json.dumps([files, read, first.text_field, first.max_bad_records])
    name = hashlib.sha256(decisive.encode()).hexdigest()
    return Path(cache_dir).expanduser() / "text_digests" / name[:32]


def _kept_digest(path: Path | None) -> str:
    """The digest that was noted, empty where there is none."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii") if path else ""
    return ""


def _note_digest(path: Path | None, sha256: str) -> None:
    """Keeps a digest; where that is not possible, all text is read the next time."""
    if path:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, sha256)


def _text_sha256(preparation: Preparation, corpus: Corpus, show: Show) -> str:
    workers = Workers(preparation.prepare_num_workers or num_cores())
    jobs = [SurveyJob(number, unit) for number, unit in enumerate(corpus.shards)]
    surveys = _survey(preparation, corpus, jobs, workers, show)
    return corpus_digest([survey.sha256 for survey in surveys])


def _different_options(preparation: Preparation, manifest: Manifest) -> list[str]:
    keys: list[str] = list(_OPTIONS)
    if _is_text(preparation):
        keys = [key for key in keys if key not in _OPTIONS_OF_IDS]
    if not _is_trained(preparation):
        keys = [key for key in keys if key not in _OPTIONS_OF_TRAINED_TOKENIZERS]
    if preparation.prepare_output_format in _RECORD_FORMATS:
        keys += _OPTIONS_OF_RECORDS
    asked = _options(preparation)
    # A data set made before a key was there was made as the key's default says.
    was = _options(Preparation()) | manifest.options
    for options in (was, asked):
        # Training reads the same from either.
        if options["prepare_output_format"] == "array_record":
            options["prepare_output_format"] = "bin"
    return [
        f"{key} was {was[key]!r} and is {asked[key]!r}" for key in keys if was[key] != asked[key]
    ]


def _options(preparation: Preparation) -> dict[str, Any]:
    return preparation.model_dump(mode="json", exclude=_NOT_OF_THE_DATA)
