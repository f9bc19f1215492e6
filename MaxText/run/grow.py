"""convert.py grow: initializes a larger model from a smaller one."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from MaxText.checkpointing import checkpoint_files
from MaxText.config import import_modules
from MaxText.config.schema import Config, flatten
from MaxText.conversion import imported_run, tokenizer_copy
from MaxText.conversion.hf_checkpoint import resolve_hf_path
from MaxText.conversion.hf_config import model_keys
from MaxText.conversion.request import ConvertArgs
from MaxText.conversion.weight_source import WeightSource
from MaxText.errors import UserError
from MaxText.growth.growth_plan import KEY, grow_shard, open_source
from MaxText.growth.resolve import PendingGrowth, resolve_growth_from
from MaxText.inference import checkpoint_config
from MaxText.run.restore import ancestors_of
from MaxText.storage.paths import check_checkpoint_path

Log = Callable[[str], None]


class GrownModel(WeightSource):
    """The weights of a larger model, made of those of a smaller one.

    Those that the smaller one lacks are initialized as train.py does with the same seed.
    """

    def __init__(self, growth: PendingGrowth, config: Config):
        """Draws the new weights.

        Args:
          growth: The plan, with the smaller model.
          config: The configuration of the larger model.
        """
        super().__init__(config)
        self.formats = {name: leaf.new_spec.dtype for name, leaf in growth.plan.leaves.items()}
        self._growth = growth
        names = [name for name, leaf in growth.plan.leaves.items() if leaf.takes_fresh(growth.mode)]

        def draw(key: jax.Array) -> dict[str, Any]:
            parameters = traverse_util.flatten_dict(self.model.initialize(key), sep="/")
            return {name: parameters[name] for name in names}

        seed = config.model.initialization.init_weights_seed
        self._fresh = jax.jit(draw)(jax.random.key(seed)) if names else {}

    def read(self, name: str) -> np.ndarray:
        """Returns a parameter of the larger model."""
        leaf = self._growth.plan.leaves[name]
        fresh = np.asarray(self._fresh[name]) if name in self._fresh else 0.0
        return grow_shard(leaf, self._growth.source.read(name), fresh=fresh)


def grow(request: ConvertArgs, log: Log) -> None:
    """Grows a model and writes a run with one checkpoint of parameters.

    Args:
      request: Source, target, and the keys of the larger model.
      log: Gets a line about each thing that was done.

    Raises:
      UserError: The source is no model with a configuration, or nothing of it grows.
    """
    imported_run.require_absent(request.target)
    check_checkpoint_path(request.target.absolute(), "to")
    # Checked first, so that a wrong path is reported as typed.
    if request.source_kind == "hf":
        resolve_hf_path(request.source, "from")
    else:
        stored = checkpoint_files.resolve_checkpoint(request.source, "from")
        if not stored.try_metadata().get("config") and not request.config_file:
            raise UserError(
                f"{stored} does not say which configuration it was made with. Name it first: "
                "convert.py grow CONFIG.yml from=..."
            )
    arguments = [*request.arguments, f"{KEY}={request.source}"]
    arguments.append(f"run_name={os.path.abspath(request.target)}")
    larger_config = checkpoint_config.load(arguments).config
    source = open_source(request.source, flatten(larger_config))
    for warning in import_modules.changes(source.metadata):
        log(warning)
    resolved = resolve_growth_from(larger_config, source)
    if resolved.growth is None or resolved.record is None:
        raise UserError(
            f"nothing grows: {source.folder} has these slots and layers already. Name more, for "
            "example slot_num=2140 or base_num_decoder_layers=24."
        )
    for line in resolved.lines:
        log(line)
    weights = GrownModel(resolved.growth, resolved.config)
    stored = sum(math.prod(leaf.shape) for leaf in source.parameters.values())
    log(f"{stored:,} -> {weights.model.num_parameters:,} parameters")
    comment = [f"Model grown by convert.py from {source.folder}."]
    lineage = ancestors_of(source.metadata, source.folder, source.step, "growth", resolved.record)
    # The new parameters themselves own cost.
    metadata = {"lineage": lineage, "spent": {"tokens": 0, "flops": 0.0}}
    with imported_run.atomic_target(request.target) as partial:
        keys = model_keys(flatten(resolved.config))
        imported_run.write_run(partial, weights, keys, comment, metadata)
        # The smaller model's tokenizer; a dataset keeps its own.
        folder = Path(source.folder)
        if source.stored is not None:
            run_folder = Path(str(source.stored.folder.parent.parent))
            folder = run_folder / tokenizer_copy.RUN_FOLDER_NAME
        copied = tokenizer_copy.copy_files(folder, partial / tokenizer_copy.RUN_FOLDER_NAME)
    imported_run.log_next_command(request.target, copied, log)
