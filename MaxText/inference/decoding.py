"""Text generation for decode.py, and the sample at the end of train.py."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from etils import epath

from MaxText.config.loading import LoadedConfig
from MaxText.config.schema import Config
from MaxText.config.training_sections import DecodingConfig
from MaxText.errors import UserError
from MaxText.formatting import pluralize
from MaxText.inference.engine import Engine
from MaxText.inference.generate import Completion, StoppingCriteria, Timing, generate
from MaxText.inference.model_tokenizer import ModelTokenizer, load_model_tokenizer
from MaxText.inference.sampling import SamplingParams
from MaxText.inference.text_files import JsonlWriter, Prompt, check_not_input, read_prompts
from MaxText.inference.trained_model import load_model
from MaxText.layers.assembly.model import Model
from MaxText.layers.params import Params
from MaxText.parallelism.mesh import ShardingPlan, microbatch_size

Write = Callable[[str], None]

_MAX_PRINTED = 2000  # characters of a prompt on the terminal


class UnexpectedOutputError(UserError):
    """The generated text differs from autoregressive_decode_assert."""

    exit_code = 1


def decode(loaded: LoadedConfig, write: Write) -> None:
    """Generates completions for the configured prompts: the program decode.py.

    Args:
      loaded: The configuration, of the weights and the command line.
      write: Takes text for the terminal, without added line ends.

    Raises:
      UserError: No usable weights, tokenizer, prompts or output file.
      UnexpectedOutputError: The text differs from autoregressive_decode_assert.
    """
    config = loaded.config
    decoding = config.decoding
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
    texts = _generate(
        engine,
        tokenizer,
        prompts,
        decoding,
        batch_size=batch_size,
        write=write,
        output=output,
    )
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
    *,
    tokenizer_folder: Path,
    run_folder: epath.Path,
) -> str:
    """Generates from the configured prompt at the end of a run and writes sample.txt.

    Parameters stay stacked: so short a text is not worth a second, unstacked copy.

    Args:
      model: The trained model.
      params: Its parameters on device.
      sharding: The run's mesh and shardings.
      config: The run's configuration.
      tokenizer_folder: The run's copy of its tokenizer.
      run_folder: Where sample.txt is written.

    Returns:
      The prompt and its continuation.
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
    """Returns the settings of decode_sampling_strategy.

    As in MaxText, a strategy uses only the keys in its name; `composite` applies all filters.
    """
    strategy = config.decode_sampling_strategy
    nucleus = {"nucleus_p": config.decode_sampling_nucleus_p}
    top_k = {"top_k": config.decode_sampling_top_k}
    filters_by_strategy = {
        "composite": nucleus | top_k | dict(config.decode_filters),
        "nucleus": nucleus,
        "topk": top_k,
    }
    return SamplingParams(
        temperature=0.0 if strategy == "greedy" else config.decode_sampling_temperature,
        repetition_penalty=config.repetition_penalty,
        **filters_by_strategy.get(strategy, {}),
    )


def _generate(
    engine: Engine,
    tokenizer: ModelTokenizer,
    prompts: list[Prompt],
    config: DecodingConfig,
    *,
    batch_size: int,
    write: Write,
    output: JsonlWriter,
) -> list[str]:
    """Generates the samples of all prompts, prints them and adds them to the output file.

    Args:
      engine: The model and its sampling settings.
      tokenizer: Encodes prompts and decodes completions.
      prompts: At least one.
      config: Decoding keys: number of samples, seed, end of a text, streaming.
      batch_size: Sequences per step.
      write: Takes text for the terminal. A single text is streamed to it as it grows.
      output: Gets one row per sample.

    Returns:
      The texts of the completions, in the order of generation.

    Raises:
      UserError: A prompt has no token, or logits are not finite.
    """
    num_samples = config.decode_num_return_sequences
    prompt_of_sample = [prompt for prompt in prompts for _ in range(num_samples)]
    ids = [_encode_prompt(tokenizer, prompt) for prompt in prompt_of_sample]
    stopping = StoppingCriteria(
        max_new_tokens=config.max_new_tokens,
        eos_ids=frozenset() if config.decode_ignore_eos else frozenset(tokenizer.eos_ids),
        stop_strings=config.decode_stop_strings,
    )
    streams = config.decode_stream and len(prompt_of_sample) == 1

    def stream(index: int, new_text: str) -> None:
        if streams:
            write(new_text)

    if streams:
        write(f"Input `{_abbreviated(prompt_of_sample[0])}` -> `")
    start_time = time.perf_counter()
    timing = Timing()
    texts = []
    num_tokens = 0
    for index, completion in generate(
        engine,
        ids,
        stopping,
        batch_size=batch_size,
        seed=config.decode_seed,
        draw_ids=[divmod(sample, num_samples) for sample in range(len(prompt_of_sample))],
        decode=tokenizer.decode,
        on_text=stream,
        timing=timing,
    ):
        prompt = prompt_of_sample[index]
        if streams:
            write("`\n")
        else:
            write(f"Input `{_abbreviated(prompt)}` -> `{completion.text}`\n")
        if completion.num_dropped:
            write(
                f"note: prompt truncated to the last {len(completion.prompt)} of "
                f"{completion.num_dropped + len(completion.prompt)} tokens; max_target_length is "
                f"{engine.window}\n"
            )
        prompt_index, sample_index = divmod(index, num_samples)
        output.add(_output_row(prompt, prompt_index, sample_index, completion))
        texts.append(completion.text)
        num_tokens += len(completion.tokens)
    _write_speed(
        write,
        num_texts=len(prompt_of_sample),
        num_tokens=num_tokens,
        seconds=time.perf_counter() - start_time,
        timing=timing,
    )
    return texts


def _encode_prompt(tokenizer: ModelTokenizer, prompt: Prompt) -> list[int]:
    """Returns the ids of a prompt; raises UserError if there are none to start from."""
    ids = tokenizer.encode(prompt.text)
    if not ids:
        raise UserError(
            f"prompt={prompt.text!r} has no token, and the tokenizer no id to begin a text with. "
            "Write a prompt."
        )
    return ids


def _output_row(
    prompt: Prompt, prompt_index: int, sample_index: int, completion: Completion
) -> dict[str, Any]:
    """Returns a completion as a row of decode_output_path."""
    return {
        **prompt.extra_fields,
        "index": prompt_index,
        "sample": sample_index,
        "prompt": prompt.text,
        "completion": completion.text,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(completion.prompt),
        "tokens": completion.tokens,
        "log_probabilities": completion.log_probabilities,
    }


def _write_speed(
    write: Write, *, num_texts: int, num_tokens: int, seconds: float, timing: Timing
) -> None:
    """Prints a summary line: number of tokens, time to the first ones, tokens per second."""
    write(
        f"{num_tokens:,} tokens of {pluralize(num_texts, 'text')} in {seconds:.1f} s; "
        f"first tokens after {timing.prompts[0]:.2f} s, compilation included"
    )
    if timing.steps:
        # The median excludes compilation, in the first step of a shape. Finished rows do not count.
        median = statistics.median(timing.steps)
        per_step = (num_tokens - num_texts) / len(timing.steps)
        write(f"; then {median * 1e3:.1f} ms per step, {per_step / median:,.1f} tokens per second")
    write("\n")


def _abbreviated(prompt: Prompt) -> str:
    """Returns the text of a prompt for the terminal, truncated if it is very long."""
    text = prompt.text
    return text if len(text) <= _MAX_PRINTED else f"{text[:_MAX_PRINTED]}..."
