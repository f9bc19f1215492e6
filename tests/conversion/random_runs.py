"""Runs with random weights and a tokenizer, written without training and without an import."""

from pathlib import Path

import jax
import numpy as np
from etils import epath

from MaxText.config.schema import Config
from MaxText.conversion.imported_run import write_run
from MaxText.conversion.tokenizer_copy import keep_tokenizer, write_json
from MaxText.conversion.weight_source import WeightSource
from MaxText.input_pipeline.tokenization.hugging_face import train_tokenizer
from MaxText.input_pipeline.tokenization.interface import CONFIG_NAME, read_json
from tests.small_models import tiny_config

TEXT = """The cat sat on a mat while dogs ran over hills, and birds sang songs of old towers near
rivers where people wrote letters to friends about apples, pears, bread, and warm evenings."""
# The end of a text, the 256 bytes, and a few merges.
VOCAB_SIZE = 288


class RandomWeights(WeightSource):
    """Normal numbers in float32: matrices that keep the scale, and norms around 1."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.formats = dict.fromkeys(self.model.parameters, np.dtype("float32"))
        generator = np.random.default_rng(0)
        self._arrays = {
            name: _draw(generator, name, spec) for name, spec in self.model.parameters.items()
        }

    def read(self, name: str) -> np.ndarray:
        return self._arrays[name]


def _draw(generator: np.random.Generator, name: str, spec: jax.ShapeDtypeStruct) -> np.ndarray:
    numbers = generator.standard_normal(spec.shape, np.float32)
    return 1 + 0.2 * numbers if name.endswith("/scale") else 0.3 * numbers


def write_random_run(
    folder: Path, decoder_block: str, *, add_bos: bool = False, **keys: object
) -> Config:
    """Writes a run of three layers of width 32 with random weights.

    Args:
      folder: Of the run; a data set's folder with the tokenizer is written next to it.
      decoder_block: Of the model.
      add_bos: Whether texts begin with the id that also ends them.
      keys: Other keys of the configuration.

    Returns:
      The configuration.
    """
    config = tiny_config(decoder_block, vocab_size=VOCAB_SIZE, **keys)
    write_run(folder, RandomWeights(config), {}, ["Random weights."], {})
    data = folder.parent / "data"
    data.mkdir()
    train_tokenizer([TEXT], VOCAB_SIZE, "a test").save(data)
    if add_bos:
        settings = read_json(data / CONFIG_NAME)
        write_json(data / CONFIG_NAME, settings | {"add_bos_token": True})
    keep_tokenizer(data, epath.Path(folder))
    return config
