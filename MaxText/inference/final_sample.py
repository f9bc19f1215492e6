"""The sample that train.py writes at its end."""

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
    """Continues the configured prompt with the dataset's tokenizer; writes sample.txt.

    The parameters stay stacked: a text this short is not worth a second copy.

    Returns:
      Prompt and continuation.
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
