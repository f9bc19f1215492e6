"""Encodes the units of a corpus with Apache Beam: the same work, the same bytes.

Beam's workers need the corpus and the folder of the data set under the same paths as this machine
has them (a shared file system), because finished units are files. Imports no jax.
"""

import functools
import shlex
from collections.abc import Sequence
from pathlib import Path

from MaxText.errors import UserError
from MaxText.input_pipeline.preparation.unit_encoding import Encoding, EncodingJob, encode_unit
from MaxText.input_pipeline.sync import write_whole

_REFUSED = ".refused"


def encode_with_beam(encoding: Encoding, jobs: Sequence[EncodingJob], beam_options: str) -> None:
    """Encodes all units; finished ones are in `encoding.folder` afterwards.

    Args:
      encoding: shared by all units.
      jobs: the units.
      beam_options: options as on Beam's command line, for example
        `--direct_running_mode=multi_processing --direct_num_workers=2`.

    Raises:
      UserError: Beam is not installed, or text is refused as by `encode_unit`.
    """
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
    for leftover in encoding.folder.glob(f"*{_REFUSED}"):
        leftover.unlink()
    options = PipelineOptions(shlex.split(beam_options))
    with apache_beam.Pipeline(options=options) as pipeline:
        # Reshuffled: Beam would otherwise fuse everything into one piece of work.
        _ = (
            pipeline
            | "Units" >> apache_beam.Create(list(jobs))
            | apache_beam.Reshuffle()
            | "Encode" >> apache_beam.Map(functools.partial(_encode, encoding))
        )
    refused = sorted(encoding.folder.glob(f"*{_REFUSED}"))
    if refused:
        raise UserError(refused[0].read_text(encoding="utf-8"))


def _encode(encoding: Encoding, job: EncodingJob) -> int:
    """Encodes a unit; what the user can mend goes into a file, for Beam would wrap and retry it."""
    try:
        encode_unit(encoding, job, lambda done: None)
    except UserError as error:
        write_whole(Path(encoding.folder, f"{job.number:06d}{_REFUSED}"), str(error))
    return job.number
