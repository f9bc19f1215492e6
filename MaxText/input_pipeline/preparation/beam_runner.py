"""Tokenizes the shards of a corpus on Apache Beam.

Workers need the corpus and the staging folder under the same paths as here (shared file system).
"""

import functools
import shlex
from collections.abc import Sequence

from MaxText.errors import UserError
from MaxText.input_pipeline.preparation.token_shards import ShardJob, Tokenization, tokenize_shard
from MaxText.storage.atomic import atomic_write_text

_REFUSED = ".refused"


def tokenize_with_beam(
    tokenization: Tokenization, jobs: Sequence[ShardJob], beam_options: str
) -> None:
    """Tokenizes all shards, given Beam command-line options."""
    try:
        import apache_beam  # pyright: ignore[reportMissingImports]
        from apache_beam.options.pipeline_options import (  # pyright: ignore[reportMissingImports]
            PipelineOptions,
        )
    except ImportError as error:
        raise UserError(
            "prepare_runner=beam needs the package apache-beam, which is not installed. Run: pip "
            "install 'MaxText[beam]', or set prepare_runner=local."
        ) from error
    folder = tokenization.staging / "shards"
    for leftover in folder.glob(f"*{_REFUSED}"):
        leftover.unlink()
    options = PipelineOptions(shlex.split(beam_options))
    with apache_beam.Pipeline(options=options) as pipeline:
        # Without a reshuffle, Beam would fuse everything into one bundle.
        _ = (
            pipeline
            | "Shards" >> apache_beam.Create(list(jobs))
            | apache_beam.Reshuffle()
            | "Tokenize" >> apache_beam.Map(functools.partial(_tokenize, tokenization))
        )
    refused = sorted(folder.glob(f"*{_REFUSED}"))
    if refused:
        raise UserError(refused[0].read_text(encoding="utf-8"))


def _tokenize(tokenization: Tokenization, job: ShardJob) -> int:
    """Tokenizes a shard. UserErrors go to a file, because Beam would wrap and retry them."""
    try:
        tokenize_shard(tokenization, job, lambda done: None)
    except UserError as error:
        path = tokenization.staging / "shards" / f"{job.number:06d}{_REFUSED}"
        atomic_write_text(path, str(error))
    return job.number
