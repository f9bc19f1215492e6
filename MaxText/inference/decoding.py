"""Text generation for decode.py, and the sample at the end of train.py."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from MaxText.config.loading import LoadedConfig
from MaxText.config.schema import Config
from MaxText.config.training_sections import DecodingConfig
from MaxText.errors import UserError
from MaxText.inference.engine import Engine
from MaxText.inference.generate import StoppingCriteria, Timing, generate
from MaxText.inference.model_tokenizer import ModelTokenizer, load_model_tokenizer
from MaxText.inference.sampling import SamplingParams
from MaxText.inference.text_files import JsonlWriter, Prompt, check_not_input, read_prompts
from MaxText.inference.trained_model import load_model
from MaxText.layers.assembly.model import Model
from MaxText.layers.params import Params
from MaxText.parallelism.mesh import ShardingPlan, microbatch_size

Write = Callable[[str], None]

_LONGEST_SHOWN = 2000  # characters of a prompt on the terminal


class UnexpectedOutputError(UserError):
    """Generated text unlike autoregressive_decode_assert."""

    exit_code = 1


def decode(loaded: LoadedConfig, write: Write) -> None:
    """Generates completions for the configured prompts.

    Raises UserError without usable weights, tokenizer, prompts or output file, and
    UnexpectedOutputError if the text differs from autoregressive_decode_assert.
    """
    config = loaded.config
    decoding = loaded.config.decoding
    prompts = read_prompts(decoding)
    check_not_input(
        "decode_output_path", decoding.decode_output_path, "prompt_file", decoding.prompt_file
    )
    output = JsonlWriter(decoding.decode_output_path)
    trained = load_model(config, lambda line: write(line + "\n"))
    tokenizer = trained.open_tokenizer(typed=loaded.typed("tokenizer_path"))
    batch_size = microbatch_size(config.batch, trained.sharding)
    if jax.process_index() > 0:  # all hosts generate the same texts
        write = _discard
        output = JsonlWriter("")
    engine = Engine(
        trained.model,
        trained.model.unstack_params(trained.params),
        trained.sharding,
        sampling_params(decoding),
        num_ids=tokenizer.num_sampled_ids(config.model.shape.vocab_size),
    )
    # Frees the arrays that the engine does not use.
    del trained
    texts = _generate(engine, tokenizer, prompts, decoding, batch_size, write, output)
    expected = decoding.autoregressive_decode_assert
    if expected and texts != [expected]:
        raise UnexpectedOutputError(
            f"the generated text is not the expected one\n  generated: {texts[0]!r}\n"
            f"  expected:  {expected!r}"
        )


def _discard(text: str) -> None:
    """A `Write` for processes that do not report."""


def write_sample(
    model: Model,
    params: Params,
    sharding: ShardingPlan,
    config: Config,
    tokenizer_folder: Path,
    run_folder: Any,
) -> str:
    """Generates from the configured prompt and writes sample.txt.

    Returns the text. Parameters stay stacked: so short a text is not worth a second, unstacked
    copy.
    """
    decoding = config.decoding
    tokenizer = load_model_tokenizer(str(tokenizer_folder), config)
    num_ids = tokenizer.num_sampled_ids(model.config.shape.vocab_size)
    engine = Engine(model, params, sharding, sampling_params(decoding), num_ids=num_ids)
    ((_, completion),) = generate(
        engine,
        [tokenizer.encode(decoding.prompt)],
        StoppingCriteria(decoding.sample_tokens),
        batch_size=1,
        seed=decoding.decode_seed,
        decode=tokenizer.tokenizer.decode,
    )
    text = decoding.prompt + completion.text
    if jax.process_index() == 0:
        (run_folder / "sample.txt").write_text(text + "\n", encoding="utf-8")
    return text


def sampling_params(config: DecodingConfig) -> SamplingParams:
    """Returns the settings of decode_sampling_strategy."""
    strategy = config.decode_sampling_strategy
    nucleus = {"nucleus_p": config.decode_sampling_nucleus_p}
    top_k = {"top_k": config.decode_sampling_top_k}
    filters = {
        "composite": nucleus | top_k | config.decode_filters.as_dict(),
        "nucleus": nucleus,
        "topk": top_k,
    }
    temperature = 0.0 if strategy == "greedy" else config.decode_sampling_temperature
    return SamplingParams(
        temperature, **filters.get(strategy, {}), repetition_penalty=config.repetition_penalty
    )


def _generate(
    engine: Engine,
    tokenizer: ModelTokenizer,
    prompts: list[Prompt],
    config: DecodingConfig,
    batch_size: int,
    write: Write,
    output: JsonlWriter,
) -> list[str]:
    samples = config.decode_num_return_sequences
    asked = [prompt for prompt in prompts for _ in range(samples)]
    ids = [tokenizer.encode(prompt.text) for prompt in asked]
    if empty := [prompt for prompt, prompt_ids in zip(asked, ids, strict=True) if not prompt_ids]:
        raise UserError(
            f"prompt={empty[0].text!r} has no token, and the tokenizer no id to begin a text with. "
            "Write a prompt."
        )
    stopping = StoppingCriteria(
        config.max_new_tokens,
        frozenset() if config.decode_ignore_eos else frozenset(tokenizer.eos_ids),
        config.decode_stop_strings,
    )
    streams = len(asked) == 1 and config.decode_stream
    if streams:
        write(f"Input `{_shown(asked[0])}` -> `")
    began = time.perf_counter()
    timing = Timing()
    texts = []
    num_tokens = 0
    for number, completion in generate(
        engine,
        ids,
        stopping,
        batch_size=batch_size,
        seed=config.decode_seed,
        names=[divmod(number, samples) for number in range(len(asked))],
        decode=tokenizer.decode,
        on_text=lambda number, piece: write(piece) if streams else None,
        timing=timing,
    ):
        prompt = asked[number]
        write("`\n" if streams else f"Input `{_shown(prompt)}` -> `{completion.text}`\n")
        if completion.num_dropped:
            write(
                f"note: prompt truncated to the last {len(completion.prompt)} of "
                f"{completion.num_dropped + len(completion.prompt)} tokens; max_target_length is "
                f"{engine.window}\n"
            )
        output.add(
            {
                **prompt.extra_fields,
                "index": number // samples,
                "sample": number % samples,
                "prompt": prompt.text,
                "completion": completion.text,
                "finish_reason": completion.finish_reason,
                "num_prompt_tokens": len(completion.prompt),
                "tokens": completion.tokens,
                "log_probabilities": completion.log_probabilities,
            }
        )
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
