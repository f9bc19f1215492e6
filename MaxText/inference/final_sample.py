"""Text sample written at the end of train.py."""

from pathlib import Path
from typing import Any

import jax

from MaxText.config.schema import Config
from MaxText.inference.decoding import choice_of
from MaxText.inference.engine import Engine
from MaxText.inference.generating import Limits, generate
from MaxText.inference.model_tokenizer import tokenizer_at
from MaxText.layers.model import Model, Parameters
from MaxText.parallelism.mesh import Layout


def write_sample(
    model: Model,
    params: Parameters,
    layout: Layout,
    config: Config,
    tokenizer_folder: Path,
    run_folder: Any,
) -> str:
    """Generates from the configured prompt and writes sample.txt.

    Returns the text. Parameters stay stacked: so short a text is not worth a second, unstacked
    copy.
    """
    section = config.decoding
    tokenizer = tokenizer_at(str(tokenizer_folder), config)
    num_ids = tokenizer.num_ids_of(model.section.shape.vocab_size)
    engine = Engine(model, params, layout, choice_of(section), num_ids=num_ids)
    ((_, completion),) = generate(
        engine,
        [tokenizer.encode(section.prompt)],
        Limits(section.sample_tokens),
        rows=1,
        seed=section.decode_seed,
        decode=tokenizer.tokenizer.decode,
    )
    text = section.prompt + completion.text
    if jax.process_index() == 0:
        (run_folder / "sample.txt").write_text(text + "\n")
    return text
