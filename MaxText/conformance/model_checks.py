"""Checks of a model: of initial values, and of the outputs of its compiled program.

Each function returns a description of the problem, or None.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.checkpointing.compatibility import array_specs
from MaxText.config.schema import flatten
from MaxText.conformance.comparison import arrays_by_name, describe_difference
from MaxText.conformance.subject import (
    CUT,
    LENGTH,
    LENGTHS,
    PROMPT,
    Subject,
    model_logits,
    variants,
)
from MaxText.cost.flops import count_flops
from MaxText.errors import UserError
from MaxText.growth.growth_plan import SourceCheckpoint
from MaxText.growth.initialize import grow_params
from MaxText.growth.resolve import resolve_growth_from
from MaxText.layers.assembly.model import Model
from MaxText.layers.assembly.remat import SAVED_NAMES
from MaxText.layers.kv_cache import resize
from MaxText.layers.params import Params


def logical_axes(subject: Subject) -> str | None:
    """Checks that every logical axis of a parameter has a rule."""
    known_axes = {name for name, _ in subject.config.mesh.logical_axis_rules}
    for name, spec in subject.models[0].parameters.items():
        for axis in spec.logical_axes:
            if axis not in (None, *known_axes):
                return f"{name} has the logical axis {axis!r}, which is not in logical_axis_rules"
    return None


def causality(subject: Subject) -> str | None:
    """Changes one token, and checks that only later tokens of its document notice."""
    logits = subject.outputs.logits
    for row, changed_position, end in ((1, CUT - 2, CUT), (2, CUT + 2, LENGTH)):
        changed = np.any(logits[row] != logits[0], axis=-1)
        if changed[:changed_position].any():
            early = changed_position - int(np.argmax(changed))
            return f"a token changes the output of tokens up to {early} before it"
        # Reductions over a whole sequence may round differently.
        if np.abs(logits[row] - logits[0])[end:].max(initial=0) > 2e-5:
            return "a token changes the output of another document behind it"
        if not changed[changed_position]:
            return "a token has no effect on its own output"
    return None


def documents(subject: Subject) -> str | None:
    """Compares two packed documents with each of them alone."""
    packed, first, second = subject.outputs.logits[[0, 3, 4]]
    separate = np.concatenate([first[:CUT], second[:-CUT]])
    error = np.abs(packed - separate).max()
    if error <= 2e-5:
        return None
    return f"logits of packed documents differ from those of documents alone by {error:.1e}"


def padding(subject: Subject) -> str | None:
    """Compares a document followed by two kinds of padding."""
    first, second = subject.outputs.logits[[5, 6], :CUT]
    return (
        None if np.array_equal(first, second) else "padding changes the output of tokens before it"
    )


def decode_state(subject: Subject) -> str | None:
    """Compares prefill and decode steps with the full forward pass."""
    if subject.outputs.decoded is None:
        return None
    rows = zip(LENGTHS, subject.outputs.logits[3:], *subject.outputs.decoded, strict=False)
    for length, full, prompt, steps in rows:
        error = np.abs(prompt[:length] - full[:length]).max()
        if not error <= 1e-4:
            return f"prefill of {length} tokens differs from the full forward pass by {error:.1e}"
        errors = np.abs(steps - full[length : length + len(steps)]).max(-1)
        if not errors.max() <= 1e-4:
            first_error = int(np.argmax(~(errors <= 1e-4)))
            return (
                f"token {first_error + 1} after a prompt of {length} differs from the full forward "
                f"pass by {errors[first_error]:.1e}"
            )
    return None


def gradients(subject: Subject) -> str | None:
    """Checks that every gradient is finite, not zero, and predicts the fall of the loss."""
    for name, gradient in arrays_by_name(subject.outputs.losses[0][1]).items():
        if not np.isfinite(gradient).all():
            return f"the gradient of {name} is not finite"
        if not np.any(gradient):
            return f"{name} has no gradient"
    if subject.config.model.attention.static_sgu:
        return None  # blocks gradients
    if not abs(subject.outputs.fell - 1) < 0.2:
        return f"the loss falls {subject.outputs.fell:.2f} times as far as the gradient says"
    return None


def scan_and_remat(subject: Subject) -> str | None:
    """Compares the loss with that of the other scan_layers, and full remat."""
    expected, actual = subject.outputs.losses
    problem = describe_difference(actual, expected, 1e-6, 2e-5)
    return problem and f"with the other scan_layers and full remat, {problem}"


def remat_policies(subject: Subject) -> str | None:
    """Compares gradients with the policy of most saved values."""
    tags = set(re.findall(r"\bname\[name=(\w+)\]", str(subject.traced.jaxpr)))
    policy = max(SAVED_NAMES, key=lambda policy: len(tags.intersection(SAVED_NAMES[policy])))
    model = Model(subject.load_config(remat_policy=policy).model)
    loss = functools.partial(subject.loss, model=model, batch=subject.batch)
    actual = jax.jit(jax.value_and_grad(loss))(subject.params)
    problem = describe_difference(actual, subject.outputs.losses[0], 1e-6, 5e-5)
    return problem and f"with remat_policy={policy}, {problem}"


def flops(subject: Subject) -> str | None:
    """Compares the FLOPs by formula with those of the traced program, to 1 %."""
    if subject.config.model.dense_connections.dense_conn:
        return None  # its sums are not dot_general in the jaxpr
    for actual, model in zip(subject.operations, subject.models, strict=True):
        formula = count_flops(model, LENGTH).executed_per_token or 0.0
        formula *= subject.batch.tokens_BT.size
        if abs(formula - actual) > 0.01 * actual:
            return f"by formula {formula:,.0f} operations, in the program {actual:,}"
    return None


def formats(subject: Subject) -> str | None:
    """Checks dtypes in bfloat16 and decode state shapes abstractly."""
    model = Model(subject.load_config(dtype="bfloat16").model)

    def outputs(params: Params) -> tuple[Any, Any]:
        """Returns hidden states and logits in bfloat16."""
        hidden, _ = model.merge(params).hidden_states(variants())
        return hidden, model_logits(model, params, variants())

    hidden, logits = jax.eval_shape(outputs, model.abstract)
    if (hidden.dtype, logits.dtype) != (jnp.bfloat16, jnp.float32):
        return (
            f"hidden states are {hidden.dtype} and logits {logits.dtype}, not bfloat16 and float32"
        )
    if not subject.decodes:
        return None

    def states(params: Params) -> tuple[Any, ...]:
        """Returns decode states: a resized one, one of that capacity, and one a step later."""
        decoder = model.merge(params)
        tokens = jnp.zeros((2, PROMPT), int)
        lengths = jnp.full(2, PROMPT)
        _, small = decoder.prefill(tokens, lengths, LENGTH // 2)
        _, large = decoder.prefill(tokens, lengths, LENGTH)
        _, after_step = decoder.decode_step(tokens[:, :1], lengths[:, None], large)
        return resize(small, LENGTH), large, after_step

    grown, large, after_step = map(jax.tree.leaves, jax.eval_shape(states, model.abstract))
    if after_step != large:
        return "the decode state changes its shapes or formats from token to token"
    if grown != large:
        return "an array of the decode state grows with context.capacity outside a KeyValueCache"
    return None


def bfloat16(subject: Subject) -> str | None:
    """Compares logits in bfloat16 with those in float32."""
    model = Model(subject.load_config(dtype="bfloat16").model)
    logits = jax.jit(lambda params: model_logits(model, params, variants()))(subject.params)
    # Of all tokens: in a single one, states that nearly cancel leave little but rounding.
    expected = subject.outputs.logits
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    return None if error < 0.1 else f"logits differ from those in float32 by {error:.0%}"


def growth(subject: Subject) -> str | None:
    """Doubles layers, slots and every size key of the part itself."""
    values = flatten(subject.config)
    arrays = arrays_by_name(subject.params)
    read = arrays.__getitem__
    metadata = {"config": values}
    source = SourceCheckpoint("SMALL", None, metadata, array_specs(arrays), read)
    part_items = (item for section in subject.config.model.parts.sections for item in section)
    sizes = [name for name, value in part_items if type(value) is int]
    for name in ("base_num_decoder_layers", "slot_num", *sizes):
        size = 2 * (values[name] if values[name] > 0 else values["base_emb_dim"])
        try:
            resolved = resolve_growth_from(subject.load_config(**{name: size}), source)
        except UserError:
            continue  # refused
        if resolved.growth is None:
            continue  # no weight depends on this key
        larger = Subject(lambda config=resolved.config, **_: config)
        model = larger.models[0]
        fresh = jax.tree.map(jnp.asarray, larger.params)
        params = grow_params(resolved.growth, model.abstract, fresh)
        logits = jax.jit(functools.partial(model_logits, model))(params, variants())
        error = np.abs(logits - subject.outputs.logits).max()
        if not error <= 2e-5:
            return f"growth to {name}={size} is not refused, and changes logits by {error:.1e}"
    return None
