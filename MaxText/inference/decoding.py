"""Text generation for decode.py."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from MaxText.config.inference_sections import Decoding
from MaxText.config.loading import LoadedConfig
from MaxText.errors import UserError
from MaxText.inference.engine import Engine
from MaxText.inference.generating import Completion, Limits, Timing, generate
from MaxText.inference.model_tokenizer import ModelTokenizer, open_tokenizer
from MaxText.inference.output import Output
from MaxText.inference.prompts import Prompt, read_prompts
from MaxText.inference.token_choice import Choice
from MaxText.inference.trained_model import TrainedModel, open_trained_model
from MaxText.parallelism.mesh import microbatch_size

Write = Callable[[str], None]

_LONGEST_SHOWN = 2000  # characters of a prompt on the terminal


class OtherText(UserError):
    """Generated text that differs from autoregressive_decode_assert."""

    exit_code = 1


def decode(loaded: LoadedConfig, write: Write) -> None:
    """Generates completions for the configured prompts.

    Raises UserError without usable weights, tokenizer, prompts or output file, and OtherText if the
    text differs from autoregressive_decode_assert.
    """
    config, section = loaded.config, loaded.config.decoding
    prompts = read_prompts(section)
    output = Output(section.decode_output, section.prompt_file)
    trained = open_trained_model(config, lambda line: write(line + "\n"))
    tokenizer = open_tokenizer(
        config, trained.folder, trained.metadata, typed=loaded.typed("tokenizer_path")
    )
    rows = microbatch_size(config.batch, trained.layout)
    if jax.process_index() > 0:  # all hosts generate the same texts
        write, output = lambda text: None, Output("", "")
    engine = make_engine(trained, choice_of(section), tokenizer)
    # Frees the arrays that the engine does not use.
    del trained
    with output:
        texts = _generate(engine, tokenizer, prompts, section, rows, write, output)
    expected = section.autoregressive_decode_assert
    if expected and texts != [expected]:
        raise OtherText(
            f"the generated text is not the expected one\n  generated: {texts[0]!r}\n"
            f"  expected:  {expected!r}"
        )


def choice_of(section: Decoding) -> Choice:
    """Returns the settings of decode_sampling_strategy."""
    settings: dict[str, Any] = {"repetition_penalty": section.repetition_penalty}
    strategy = section.decode_sampling_strategy
    if strategy == "greedy":
        return Choice(temperature=0.0, **settings)
    settings["temperature"] = section.decode_sampling_temperature
    if strategy in ("composite", "nucleus"):
        settings["nucleus_p"] = section.decode_sampling_nucleus_p
    if strategy == "composite":
        settings |= {
            "min_p": section.decode_sampling_min_p,
            "typical_p": section.decode_sampling_typical_p,
            "eta": section.decode_sampling_eta,
            "entmax_alpha": section.decode_entmax_alpha,
        }
    if strategy in ("composite", "topk"):
        settings["top_k"] = section.decode_sampling_top_k
    return Choice(**settings)


def make_engine(trained: TrainedModel, choice: Choice, tokenizer: ModelTokenizer) -> Engine:
    """Returns an engine that takes over the arrays of `trained`."""
    num_ids = tokenizer.num_ids_of(trained.model.section.shape.vocab_size)
    return Engine(
        trained.model,
        trained.model.unstack_params(trained.params),
        trained.layout,
        choice,
        num_ids=num_ids,
    )


def _generate(
    engine: Engine,
    tokenizer: ModelTokenizer,
    prompts: list[Prompt],
    section: Decoding,
    rows: int,
    write: Write,
    output: Output,
) -> list[str]:
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
        write(f"Input `{_shown(asked[0])}` -> `")
    began, timing = time.perf_counter(), Timing()
    texts, num_tokens = [], 0
    for number, completion in generate(
        engine,
        ids,
        limits,
        rows=rows,
        seed=section.decode_seed,
        names=[divmod(number, samples) for number in range(len(asked))],
        decode=tokenizer.decode,
        show_piece=(lambda number, piece: write(piece)) if streams else None,
        timing=timing,
    ):
        prompt = asked[number]
        if streams:
            write("`\n")
        else:
            write(f"Input `{_shown(prompt)}` -> `{completion.text}`\n")
        if completion.num_dropped:
            write(
                f"note: the model has a window of {engine.window} tokens; the first "
                f"{completion.num_dropped} of the prompt's "
                f"{completion.num_dropped + len(completion.prompt)} were not read\n"
            )
        output.add(_row(prompt, number // samples, number % samples, completion))
        texts.append(completion.text)
        num_tokens += len(completion.tokens)
    seconds = time.perf_counter() - began
    write(
        f"{num_tokens:,} tokens of {len(asked):,} text{'s' * (len(asked) > 1)} in {seconds:.1f} s; "
        f"first tokens after {timing.prompts[0]:.2f} s, compilation included"
    )
    if timing.steps:
        # The median excludes compilation, in the first step of a shape. Finished rows do not count.
        median = statistics.median(timing.steps)
        per_step = (num_tokens - len(asked)) / len(timing.steps)
        write(f"; then {median * 1e3:.1f} ms per step, {per_step / median:,.1f} tokens per second")
    write("\n")
    return texts


def _shown(prompt: Prompt) -> str:
    text = prompt.text
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _row(prompt: Prompt, index: int, sample: int, completion: Completion) -> dict[str, Any]:
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
