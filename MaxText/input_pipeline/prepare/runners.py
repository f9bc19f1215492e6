"""Engines that tokenize the shards of a preparation: prepare.runner.

Each maps the same pure function over the shards, so the dataset has the same bytes with every
engine and any number of workers. A finished shard is in the ledger, whoever tokenized it: an engine
that tries a shard again, and a command that is started again, do it once. Workers on other machines
need the same paths.
"""

import functools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from MaxText.errors import UserError
from MaxText.input_pipeline.document_sources.corpus import Corpus
from MaxText.input_pipeline.prepare.process_pool import run_jobs, run_once
from MaxText.input_pipeline.prepare.token_shards import ShardJob, Tokenization, tokenize_shard
from MaxText.runtime.cores import num_cores

Results = list[dict[str, Any]]  # of TokenizedShard, in the order of the jobs


def tokenize_locally(
    tokenization: Tokenization,
    jobs: Sequence[ShardJob],
    corpus: Corpus,
    log: Callable[[str], None],
) -> Results:
    """Tokenizes all shards in processes of this machine; UserError if one is killed."""
    return run_jobs(
        "Encoding",
        tokenize_shard,
        tokenization,
        jobs,
        sizes=[shard.num_bytes for shard in corpus.shards],
        max_processes=tokenization.keys.prepare_num_workers,
        log=log,
        ledger=tokenization.ledger,
    )


def tokenize_with_beam(tokenization: Tokenization, jobs: Sequence[ShardJob]) -> Results:
    """Tokenizes all shards on Apache Beam; UserError without it, or for an error of a worker."""
    try:
        import apache_beam  # pyright: ignore[reportMissingImports]
        from apache_beam.options.pipeline_options import (  # pyright: ignore[reportMissingImports]
            PipelineOptions,
        )
    except ImportError as error:
        raise _missing("beam", "apache-beam") from error
    options = PipelineOptions(shlex.split(tokenization.keys.prepare.beam_options))
    tokenize_job = functools.partial(_tokenize_once, tokenization)
    try:
        with apache_beam.Pipeline(options=options) as pipeline:
            # Without a reshuffle, Beam would fuse everything into one bundle.
            _ = (
                pipeline
                | "Shards" >> apache_beam.Create([*enumerate(jobs)])
                | apache_beam.Reshuffle()
                | "Tokenize" >> apache_beam.Map(tokenize_job)
            )
    except Exception as error:  # runners raise errors of their own about those of workers
        raise UserError(f"prepare.runner=beam: {error}") from error
    return _results(tokenization, jobs)


def tokenize_with_datatrove(tokenization: Tokenization, jobs: Sequence[ShardJob]) -> Results:
    """Tokenizes all shards on an executor of datatrove: local processes, or an array of SLURM.

    Waits for the end of the array, and a task that fails fails the command; started again, it
    submits those tasks that are left.

    Raises:
      UserError: datatrove is not installed, it does not know an option, or a task failed.
    """
    try:
        from datatrove.executor.local import LocalPipelineExecutor
        from datatrove.executor.slurm import SlurmPipelineExecutor
    except ImportError as error:
        raise _missing("datatrove", "datatrove") from error
    executors = {"local": LocalPipelineExecutor, "slurm": SlurmPipelineExecutor}
    options = _datatrove_options(tokenization.keys.prepare.datatrove_options)
    name = options.pop("executor", "local")
    if name not in executors:
        raise UserError(
            f"prepare.datatrove_options: executor={name} is none of {', '.join(executors)}."
        )
    logging_dir = str(tokenization.staging.absolute() / "datatrove")
    arguments: dict[str, Any] = {"logging_dir": logging_dir}
    if name == "local":
        arguments["workers"] = tokenization.keys.prepare_num_workers or num_cores()
    else:
        arguments |= _slurm_arguments()
        # sbatch returns when the array has ended.
        options["sbatch_args"] = {"wait": ""} | options.get("sbatch_args", {})
    tokenization.ledger.mkdir(exist_ok=True)
    step = _DatatroveStep(tokenization, jobs)
    try:
        executor = executors[name]([step], tasks=len(jobs), **arguments | options)
    except TypeError as error:
        raise UserError(f"prepare.datatrove_options: {error}.") from error
    try:
        executor.run()
    except Exception as error:  # of a worker, or of sbatch
        raise UserError(
            f"prepare.runner=datatrove: {error}. Logs: {logging_dir}. The same command resumes."
        ) from error
    return _results(tokenization, jobs)


def _tokenize_once(
    tokenization: Tokenization, numbered_job: tuple[int, ShardJob]
) -> dict[str, Any]:
    """Returns the result of a shard from the ledger, or tokenizes it."""
    return run_once(tokenize_shard, tokenization.ledger, tokenization, numbered_job)


def _results(tokenization: Tokenization, jobs: Sequence[ShardJob]) -> Results:
    """Returns the results of all shards, which an engine has left in the ledger."""
    return [_tokenize_once(tokenization, numbered_job) for numbered_job in enumerate(jobs)]


class _DatatroveStep:
    """A step of a datatrove pipeline whose task number `rank` is a shard."""

    def __init__(self, tokenization: Tokenization, jobs: Sequence[ShardJob]):
        self.tokenization = tokenization
        self.jobs = jobs

    def __call__(self, data: object, rank: int = 0, world_size: int = 1) -> None:
        """Tokenizes a shard that is not in the ledger."""
        _tokenize_once(self.tokenization, (rank, self.jobs[rank]))


def _slurm_arguments() -> dict[str, Any]:
    """Returns arguments of SlurmPipelineExecutor; UserError without SLURM's sbatch."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "prepare.datatrove_options: executor=slurm needs sbatch, which is not on the PATH. Run "
            "the command on a login node of the cluster, or set executor=local."
        )
    activate = os.path.join(sys.prefix, "bin", "activate")
    has_environment = os.path.exists(activate)
    return {"job_name": "prepare_data", "venv_path": activate if has_environment else None}


def _datatrove_options(text: str) -> dict[str, Any]:
    """Parses `name=value` words, with values in YAML; UserError for a word without `=`."""
    options = {}
    for word in shlex.split(text):
        name, separator, value = word.partition("=")
        if not separator:
            raise UserError(
                f"prepare.datatrove_options: {word!r} is no name=value. They are the arguments of "
                "datatrove's executor: executor=slurm partition=cpu time=02:00:00 workers=100."
            )
        options[name] = yaml.safe_load(value) if value[:1] in "[{" or value.isdigit() else value
    return options


def _missing(runner: str, package: str) -> UserError:
    """Returns the error for an engine that is not installed."""
    return UserError(
        f"prepare.runner={runner} needs the package {package}, which is not installed. Run: pip "
        f"install 'jaxpretrain[{runner}]', or set prepare.runner=local."
    )
