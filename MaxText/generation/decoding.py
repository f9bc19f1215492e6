"""Generates text as decode.py is asked to: prompts in, texts on the terminal and in a file."""

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from MaxText.configuration.inference_sections import Decoding
from MaxText.configuration.loading import Loaded
from MaxText.errors import UserError
from MaxText.generation.engine import Engine
from MaxText.generation.generating import Completion, Limits, Timing, generate
from MaxText.generation.prompts import Prompt, read_prompts
from MaxText.generation.token_choice import Choice
from MaxText.inference.model_tokenizer import ModelTokenizer, open_tokenizer
from MaxText.inference.trained_model import TrainedModel, open_trained_model
from MaxText.layers.model import in_parts
from MaxText.parallelism.mesh import rows_of_batch

# Writes to the terminal: text, and what ends it.
Write = Callable[[str], None]


class OtherText(UserError):
    """The text is not the one of autoregressive_decode_assert."""

    exit_code = 1


def decode(loaded: Loaded, write: Write) -> None:
    """Continues the prompts of a configuration.

    Raises:
      UserError: no weights or tokenizer, prompts or an output file that cannot be used.
      OtherText: as the class says.
    """
    config, section = loaded.config, loaded.config.decoding
    prompts = read_prompts(section)
    with _output_file(section.decode_output) as output:
        trained = open_trained_model(config, lambda line: write(line + "\n"))
        tokenizer = open_tokenizer(
            config, trained.folder, trained.metadata, typed=loaded.typed("tokenizer_path")
        )
        rows = rows_of_batch(config.batch, trained.layout)
        engine = make_engine(trained, choice_of(section), tokenizer)
        # Only the engine's own arrays are kept.
        del trained
        texts = _generate(engine, tokenizer, prompts, section, rows, write, output)
    expected = section.autoregressive_decode_assert
    if expected and texts != [expected]:
        raise OtherText(
            f"the generated text is not the expected one\n  generated: {texts[0]!r}\n"
            f"  expected:  {expected!r}"
        )


def choice_of(section: Decoding) -> Choice:
    """How tokens are chosen, by the configuration."""
    strategy = section.decode_sampling_strategy
    greedy = strategy == "greedy"
    return Choice(
        temperature=0.0 if greedy else section.decode_sampling_temperature,
        top_k=section.decode_sampling_top_k,
        nucleus_p=section.decode_sampling_nucleus_p,
        min_p=section.decode_sampling_min_p,
        typical_p=section.decode_sampling_typical_p,
        eta=section.decode_sampling_eta,
        entmax_alpha=section.decode_entmax_alpha,
        repetition_penalty=section.repetition_penalty,
    )


def make_engine(trained: TrainedModel, choice: Choice, tokenizer: ModelTokenizer) -> Engine:
    """An engine of its own arrays; those of `trained` are given up to it."""
    num_ids = min(tokenizer.tokenizer.entry.vocab_size, trained.model.section.shape.vocab_size)
    return Engine(trained.model, in_parts(trained.params), trained.layout, choice, num_ids=num_ids)


def _generate(
    engine: Engine,
    tokenizer: ModelTokenizer,
    prompts: list[Prompt],
    section: Decoding,
    rows: int,
    write: Write,
    output: IO[str] | None,
) -> list[str]:
    """Texts in the order in which they were finished."""
    samples = section.decode_num_samples
    asked = [prompt for prompt in prompts for _ in range(samples)]
    ids = [tokenizer.encode(prompt.text) for prompt in asked]
    if empty := [prompt for prompt, prompt_ids in zip(asked, ids, strict=True) if not prompt_ids]:
        raise UserError(
            f"prompt={empty[0].text!r} has no token, and the tokenizer no id to begin a text with. "
            "Write a prompt."
        )
    limits = Limits(
        section.max_new_tokens,
        frozenset() if section.decode_ignore_end else frozenset(tokenizer.ends),
        section.decode_stop,
    )
    streams = len(asked) == 1 and section.decode_stream
    if streams:
        write(f"Input `{asked[0].text}` -> `")
    began, timing = time.perf_counter(), Timing()
    texts, num_tokens = [], 0
    for number, completion in generate(
        engine,
        ids,
        limits,
        rows=rows,
        seed=section.decode_seed,
        decode=tokenizer.decode,
        show_piece=(lambda number, piece: write(piece)) if streams else None,
        timing=timing,
    ):
        prompt = asked[number]
        if streams:
            write("`\n")
        else:
            write(f"Input `{prompt.text}` -> `{completion.text}`\n")
        if completion.num_dropped:
            write(
                f"note: the model has a window of {engine.window} tokens; the first "
                f"{completion.num_dropped} of the prompt's "
                f"{completion.num_dropped + len(completion.prompt)} were not read\n"
            )
        if output is not None:
            row = _row(prompt, number // samples, number % samples, completion)
            output.write(json.dumps(row, ensure_ascii=False) + "\n")
            output.flush()
        texts.append(completion.text)
        num_tokens += len(completion.tokens)
    seconds = time.perf_counter() - began
    write(
        f"{num_tokens:,} tokens for {len(asked):,} prompts in {seconds:.1f} s; first tokens after "
        f"{timing.prompts[0]:.2f} s, compilation included"
    )
    if timing.steps:
        median = statistics.median(timing.steps)
        write(
            f", then {median * 1e3:.1f} ms per step of up to {min(rows, len(asked))} texts: "
            f"{min(rows, len(asked)) / median:,.1f} tokens per second"
        )
    write("\n")
    return texts


def _row(prompt: Prompt, index: int, sample: int, completion: Completion) -> dict[str, Any]:
    """A line of the output file: the prompt's own line, and what came after it."""
    return {
        **prompt.fields,
        "index": index,
        "sample": sample,
        "prompt": prompt.text,
        "completion": completion.text,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(completion.prompt),
        "tokens": completion.tokens,
        "log_probabilities": completion.log_probabilities,
    }


@contextlib.contextmanager
def _output_file(name: str) -> Iterator[IO[str] | None]:
    """The file to write to, opened before anything slow happens; None without a name."""
    if not name:
        yield None
        return
    path = Path(name).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"decode_output={name} cannot be written: {error.strerror}.") from error
    with file:
        yield file
