"""Distillation: learn from the probabilities of a trained model, besides the text.

    python MaxText/train.py configs/quickstart.yml                                     # the teacher
    python MaxText/train.py examples/distillation.yml teacher_path=maxtext_output/quickstart

With p and q the teacher's and the student's probabilities at temperature tau (Hinton et al. 2015,
section 2, https://arxiv.org/abs/1503.02531), the loss of a token is

    (1 - w) CE(q, target) + w tau^2 KL(p || q)

The teacher has the student's vocabulary, and any other parts and sizes. Its parameters are read
from its checkpoint at every start. They are not trained, and not saved with the student.

Legend: B sequences, T tokens, b and t those of a chunk, V vocab_size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from MaxText.config.keys import Section, key
from MaxText.config.layer_sections import Dimensions
from MaxText.cost.flops import count_flops
from MaxText.errors import UserError
from MaxText.inference.frozen_model import open_frozen_model
from MaxText.layers.assembly.decoder import Decoder
from MaxText.layers.batch import Batch
from MaxText.layers.part import Flops, Init, register
from MaxText.training.model_objective import (
    Objective,
    ObjectiveContext,
    ObjectiveSums,
    PretrainedModel,
    logits_of,
)
from MaxText.training.objective import cross_entropy


class Keys(Section):
    """Distillation."""

    teacher_path: str = key("", "Run, checkpoint or hf:FOLDER of the teacher.")
    teacher_weight: float = key(0.5, "Weight of the loss against the teacher.", ge=0, le=1)
    teacher_temperature: float = key(1.0, "Temperature of both probabilities.", gt=0)


@register("objective", "distillation", keys=Keys)
class Distillation(Objective):
    """Cross entropy, and Kullback-Leibler divergence from a teacher."""

    def __init__(self, config: Keys, init: Init, rngs: nnx.Rngs):
        self.config = config

    @classmethod
    def problem(cls, config: Keys, dimensions: Dimensions) -> str | None:
        """Returns that the teacher is missing, or None."""
        return None if config.teacher_path else "teacher_path is not set"

    @classmethod
    def frozen_models(cls, config: Keys) -> dict[str, PretrainedModel]:
        """Returns the teacher."""
        return {"teacher": open_frozen_model(config.teacher_path, "teacher_path")}

    @classmethod
    def flops(cls, config: Keys, dimensions: Dimensions, length: int) -> dict[str, Flops]:
        """Returns the teacher's forward pass; it has no backward pass."""
        teacher = cls.frozen_models(config)["teacher"].model
        count = count_flops(teacher, length)
        executed = sum(part.hardware_flops for part in count.parts)
        return {"teacher": Flops(count.forward, executed, backward=0)}

    def __call__(
        self, decoder: Decoder, batch: Batch, h_BTD: jax.Array, context: ObjectiveContext
    ) -> ObjectiveSums:
        """Returns both losses, and the unweighted divergence.

        Args:
          decoder: The student.
          batch: Read by the student and the teacher.
          h_BTD: The student's final hidden states.
          context: Has the teacher.
        """
        teacher = context.frozen["teacher"]
        num_ids = decoder.config.shape.vocab_size
        if teacher.config.shape.vocab_size != num_ids:
            raise UserError(
                f"the teacher has vocab_size={teacher.config.shape.vocab_size}, and the student "
                f"{num_ids}: both have to share a tokenizer"
            )
        temperature = self.config.teacher_temperature
        teacher_h_BTD, _ = teacher.hidden_states(batch, drops_tokens=False)

        def sums(
            logits: Callable[[], jax.Array],
            teacher_logits: Callable[[], jax.Array],
            targets_BT: jax.Array,
            loss_mask_BT: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            """Returns the weighted sums of cross entropy and divergence in a chunk of tokens."""
            logits_BTV = logits()
            losses_BT, _ = cross_entropy(logits_BTV, targets_BT)
            log_p_BTV = jax.nn.log_softmax(teacher_logits() / temperature)
            log_q_BTV = jax.nn.log_softmax(logits_BTV / temperature)
            divergence_BT = jnp.sum(jnp.exp(log_p_BTV) * (log_p_BTV - log_q_BTV), axis=-1)
            return jnp.sum(losses_BT * loss_mask_BT), jnp.sum(divergence_BT * loss_mask_BT)

        nats, divergence = context.in_chunks(
            sums,
            logits_of(decoder, batch, h_BTD),
            logits_of(teacher, batch, teacher_h_BTD),
            batch.targets_BT,
            batch.loss_mask_BT,
        )
        weight = self.config.teacher_weight
        return ObjectiveSums(
            losses={
                "text_loss": (1 - weight) * nats,
                "teacher_loss": weight * temperature**2 * divergence,
            },
            metrics={"lm_loss": nats, "teacher_divergence": divergence},
        )
