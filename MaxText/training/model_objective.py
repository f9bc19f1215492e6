"""The protocol of objectives that read the model.

An objective of logits and targets alone is a function (objective.py). Any other is a class::

    @register("objective", "my_objective", keys=MyKeys)
    class MyObjective(Objective):
        def __call__(self, decoder, batch, h_BTD, context): ...    # ObjectiveSums

It may read outputs of layers, compute logits of its own, have weights that are trained with the
model, and read models that are not trained, such as a teacher. docs/how-to/write_an_objective.md
shows both forms.

Legend: B sequences, T tokens, b sequences and t tokens of a chunk, D emb_dim, V vocab_size.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from MaxText.config.model_sections import LayerConfig, ModelConfig
from MaxText.config.problems import InvalidCombinationError
from MaxText.config.registry import lookup
from MaxText.errors import UserError
from MaxText.layers.assembly.decoder import Decoder
from MaxText.layers.assembly.model import Model
from MaxText.layers.batch import Batch
from MaxText.layers.params import Params
from MaxText.layers.part import Part, PartConfig
from MaxText.layers.part_scalars import Losses, Scalars
from MaxText.parallelism.logical_sharding import axis_rules
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.value_types import PyTree, Tree

FrozenParams = Mapping[str, Params]  # parameters of each frozen model, by its name


class ObjectiveSums(NamedTuple):
    """What an objective returns: float32 scalars, each a sum over a batch or over a part of one.

    The program adds them up over microbatches, and divides each by the weight of its name
    (`Objective.weights`) in the whole global batch. Names are those of metrics: `lm_loss` is only
    for a cross entropy in nats at the targets, and names of other metrics of a step, such as
    grad_norm, are taken.
    """

    losses: Losses  # the sum of their means is minimized
    metrics: Losses = {}  # reported beside them  # noqa: RUF012
    # What layers of its own return beside their outputs. It is added to what those of the model
    # return under the same names.
    layer_scalars: Scalars = {}  # noqa: RUF012
    log_z: jax.Array | None = None  # weighted sum of log(Z) at the targets; reported as `log_z`


@dataclasses.dataclass(frozen=True, eq=False)
class PretrainedModel:
    """A trained model that an objective reads and that is never trained, such as a teacher.

    `MaxText.inference.frozen_model.open_frozen_model` opens one from a checkpoint. Its parameters
    are an argument of the compiled steps, on the mesh of the run. They are no part of the train
    state: they have no gradient and no optimizer state, and checkpoints refer to them by the key
    that names their path.

    Attributes:
      model: The model without values, with `auto` resolved.
      read: From abstract parameters with shardings to the parameters on these devices.
      source: Where they are from, in a few words.
    """

    model: Model
    read: Callable[[Params], Params]
    source: str


@dataclasses.dataclass(frozen=True)
class ObjectiveContext:
    """What an objective may read besides the decoder, the batch and the final hidden states.

    Attributes:
      layer_outputs: Output [B, T, D] of each layer in `Objective.read_layers`, by its index: the
        residual stream after it.
      frozen: The models of `Objective.frozen_models` with their parameters, by name.
      dropout_key: RNG key of this step; None without dropout. Fold a number into it.
      training: Whether the model is trained, as opposed to evaluated.
      num_chunks: num_vocab_tiling.
    """

    layer_outputs: Mapping[int, jax.Array]
    frozen: Mapping[str, Decoder]
    dropout_key: jax.Array | None
    training: bool
    num_chunks: int

    def in_chunks(self, function: Callable[..., Tree], *arrays: PyTree) -> Tree:
        """Applies a function to num_vocab_tiling chunks of sequences, one after the other.

        For all that computes logits, so that [B, T, V] never exists as a whole::

            def sums(logits, targets_BT, loss_mask_BT):
                losses_BT, _ = cross_entropy(logits(), targets_BT)
                return {"lm_loss": jnp.sum(losses_BT * loss_mask_BT)}

            logits = logits_of(decoder, batch, h_BTD)
            context.in_chunks(sums, logits, batch.targets_BT, batch.loss_mask_BT)

        The backward pass computes the function of each chunk again instead of saving its logits.

        Args:
          function: From the arrays of a chunk to a tree of scalars and arrays [B, t, ...].
          *arrays: Arrays [B, T, ...], trees of them, or results of `logits_of`.

        Returns:
          The tree. Scalars are sums over chunks, and arrays are joined to [B, T, ...].
        """
        if self.num_chunks == 1:
            return function(*arrays)
        chunks = jax.tree.map(lambda x: _split_length(x, self.num_chunks), arrays)
        # The backward pass recomputes a chunk's logits instead of saving all of them.
        outputs = jax.lax.map(lambda chunk: jax.checkpoint(function)(*chunk), chunks)
        return jax.tree.map(_join_chunks, outputs)


def logits_of(decoder: Decoder, batch: Batch, h_BTD: jax.Array) -> Callable[[], jax.Array]:
    """Returns a function without arguments that returns float32 logits [B, T, V].

    As an argument of `ObjectiveContext.in_chunks` it becomes a function that returns the logits of
    a chunk, [B, t, V]: it is a tree of the hidden states and their positions.

    Args:
      decoder: The model, or a frozen one.
      batch: Its batch.
      h_BTD: What the head reads, of all tokens.
    """
    head_state = decoder.head_state(h_BTD, batch)  # None unless the head reads other tokens
    # In the sequence, to tell a head its chunk. Those in `batch` are positions in the document.
    positions_BT = jnp.broadcast_to(jnp.arange(h_BTD.shape[1]), h_BTD.shape[:2])

    def logits(h_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        return decoder.logits(h_BTD, head_state, positions_BT)

    return jax.tree_util.Partial(logits, h_BTD, positions_BT)


class Objective(Part):
    """An objective that reads the model: hidden states, the batch, and weights of its own.

    Weights that it declares are trained and saved with the model, under `objective/`. Those of a
    matrix count 2 FLOPs per token. `flops` counts other products: further ones with weights of its
    own, those with weights of the model, such as a second pass of the head, and those of frozen
    models, which have no backward pass (`backward=0`). Products with own weights are taken to be
    inside of `in_chunks`, where the backward pass repeats them, unless `not_recomputed` names their
    attribute.

    `config` of `__init__` and of class methods is the objective's own keys, or else the model's.

    Attributes:
      layer_attributes: Own attributes that hold layers: computed outside of `in_chunks`, and
        rematerialized as those of the model are (`apply_remat`).
    """

    rows = "objective"
    layer_attributes: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def config_of(cls, layer: LayerConfig) -> PartConfig:
        """Returns the objective's own keys, or else the model's."""
        config = layer.config.objective.parts.of(cls)
        return layer.config if config is None else config

    def __call__(
        self, decoder: Decoder, batch: Batch, h_BTD: jax.Array, context: ObjectiveContext
    ) -> ObjectiveSums:
        """Returns sums of losses and metrics over a batch.

        The batch may be a microbatch, so a loss must not combine its sequences.

        Args:
          decoder: The model with its parameters: `decoder.logits` is the head,
            `decoder.token_embedder` the table, `decoder.config` has all keys of the model.
          batch: Tokens, targets, loss weights, positions and segments.
          h_BTD: Hidden states after the final norm, which the head reads.
          context: Outputs of layers, frozen models, and chunks of the sequence.
        """
        raise NotImplementedError

    def read_layers(self) -> Sequence[int]:
        """Returns the indices of the layers whose outputs it reads, from 0."""
        return ()

    @classmethod
    def weights(cls, config: PartConfig, batch: Batch) -> Losses:
        """Returns what sums are divided by, as float32 scalars by the name of the loss or metric.

        Names that are left out are divided by the sum of the weights of the targets,
        `batch.loss_mask_BT`. A weight depends on the batch alone. It is that of the whole global
        batch, known before the first microbatch, so that accumulated gradients are exact. A sum of
        weights below 1 counts as 1.

        Args:
          config: Its own keys, or else the model's.
          batch: The global batch.
        """
        return {}

    @classmethod
    def own_layers(cls, config: PartConfig) -> tuple[LayerConfig, ...]:
        """Returns keys and sizes of the layers of its own, to count the FLOPs of their parts.

        Args:
          config: Its own keys, or else the model's.
        """
        return ()

    @classmethod
    def num_head_passes(cls, config: PartConfig) -> int:
        """Returns how often it applies the model's head, besides once to what the head reads.

        Args:
          config: Its own keys, or else the model's.
        """
        return 0

    @classmethod
    def frozen_models(cls, config: PartConfig) -> dict[str, PretrainedModel]:
        """Returns the models that it reads and does not train, by name.

        Args:
          config: Its own keys, or else the model's.
        """
        return {}


def objective_class(config: ModelConfig) -> type[Objective] | None:
    """Returns the class of a model's objective; None if it is a function of logits."""
    objective = lookup("objective", config.objective.name)
    return objective if isinstance(objective, type) else None


def objective_config(config: ModelConfig) -> PartConfig:
    """Returns what the class of a model's objective gets as its `config`."""
    objective = objective_class(config)
    assert objective is not None
    return objective.config_of(LayerConfig(config, config.shape.dimensions))


def own_layers(config: ModelConfig) -> tuple[LayerConfig, ...]:
    """Returns keys and sizes of the layers of a model's objective."""
    objective = objective_class(config)
    return () if objective is None else objective.own_layers(objective_config(config))


def frozen_models(config: ModelConfig) -> dict[str, PretrainedModel]:
    """Returns the frozen models of a model's objective, by name."""
    objective = objective_class(config)
    return {} if objective is None else objective.frozen_models(objective_config(config))


def _frozen_models_on(config: ModelConfig, sharding: ShardingPlan) -> dict[str, PretrainedModel]:
    """Returns the frozen models of an objective, with `auto` resolved for the devices of a mesh."""
    with axis_rules(sharding.mesh, sharding.rules):
        return frozen_models(config)


def abstract_frozen_params(config: ModelConfig, sharding: ShardingPlan) -> dict[str, Params]:
    """Returns the shapes and shardings of frozen parameters on a mesh.

    Args:
      config: Of the model that is trained, with `auto` resolved.
      sharding: Of the mesh.

    Raises:
      UserError: A frozen model does not fit the pipeline stages of the mesh.
    """
    models = _frozen_models_on(config, sharding)
    for name, frozen in models.items():
        _check_stages(name, frozen, sharding)
    return {
        name: sharding.with_shardings(frozen.model.abstract, frozen.model.parameters)
        for name, frozen in models.items()
    }


def _check_stages(name: str, frozen: PretrainedModel, sharding: ShardingPlan) -> None:
    """Raises UserError if a frozen model cannot run on the pipeline stages of a mesh."""
    num_stages = sharding.mesh.shape["stage"]
    if num_stages == 1:
        return
    try:
        frozen.model.config.pipeline_schedule(num_stages)
    except InvalidCombinationError as error:
        raise UserError(
            f"{name} ({frozen.source}) runs on the mesh of the model that is trained, and does not "
            f"fit its {num_stages} pipeline stages: {error}"
        ) from error


def read_frozen_params(config: ModelConfig, sharding: ShardingPlan) -> dict[str, Params]:
    """Returns the frozen parameters of a model's objective, on the devices of a mesh.

    Args:
      config: Of the model that is trained, with `auto` resolved.
      sharding: Of the mesh.

    Raises:
      UserError: They cannot be read.
    """
    abstract = abstract_frozen_params(config, sharding)
    models = _frozen_models_on(config, sharding)
    return {name: frozen.read(abstract[name]) for name, frozen in models.items()}


def frozen_lines(config: ModelConfig, sharding: ShardingPlan) -> list[str]:
    """Returns a line about each frozen model, for the log of a run."""
    models = _frozen_models_on(config, sharding)
    return [
        f"{name}: {frozen.source}, {frozen.model.num_parameters:,} parameters, not trained"
        for name, frozen in models.items()
    ]


def _split_length(x_BT: jax.Array, num_chunks: int) -> jax.Array:
    """Reshapes [B, T, ...] to [chunks, B, T / chunks, ...]."""
    batch_size, length = x_BT.shape[:2]
    x_BCT = x_BT.reshape(batch_size, num_chunks, length // num_chunks, *x_BT.shape[2:])
    return jnp.moveaxis(x_BCT, 1, 0)


def _join_chunks(x: jax.Array) -> jax.Array:
    """Sums scalars of chunks [chunks]; reshapes [chunks, B, t, ...] to [B, T, ...]."""
    if x.ndim == 1:
        return jnp.sum(x)
    x_BCT = jnp.moveaxis(x, 0, 1)
    return x_BCT.reshape(x_BCT.shape[0], -1, *x_BCT.shape[3:])
