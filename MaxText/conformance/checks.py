"""Conformance checks for architectures and parts, run by check_part.py.

Most checks read one compiled program: loss and gradients of a small model, the same scanned and
with full remat, logits of sequences that differ in one token, and logits from the decode state.

B sequences, T tokens, V vocab_size.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from MaxText.checkpointing.compatibility import array_specs, leaf_path
from MaxText.config.schema import Config, flatten
from MaxText.config.values import to_yaml
from MaxText.cost.flops import count_flops
from MaxText.errors import UserError
from MaxText.growth.growth_plan import SourceCheckpoint
from MaxText.growth.initialize import grow_params
from MaxText.growth.resolve import resolve_growth_from
from MaxText.layers.assembly.model import Model, Parameters
from MaxText.layers.assembly.remat import SAVED_NAMES
from MaxText.layers.batch import Batch
from MaxText.layers.kv_cache import resize
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training.objective import loss_sums, num_tokens
from MaxText.training.optimizer import make_optimizer
from MaxText.training.schedule import learning_rate_schedule
from MaxText.training.step import make_initialize, make_train_step

# tokens of a sequence, a prompt, and the first document
LENGTH = 12
PROMPT = 5
CUT = 5
LENGTHS = np.array([PROMPT, 2])  # of the two prompts
SIZES: dict[str, Any] = {
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "base_mlp_dim": 16,
    "head_dim": 4,
    "base_num_decoder_layers": 2,
    "vocab_size": 32,
    "max_target_length": LENGTH,
    "normalization_layer_epsilon": 1e-5,
    "attention_block_size": 5,
}
TRAINED: dict[str, Any] = {
    "dtype": "float32",
    "attention": "dot_product",
    "scan_layers": True,
    "remat_policy": "none",
    "dataset_type": "synthetic",
    "steps": 10,
    "warmup_steps_fraction": 0.0,
}
MESHES: tuple[dict[str, int], ...] = (
    {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2},
    {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
)


class Check(NamedTuple):
    """One property; `problem` describes its violation, or is None."""

    name: str
    problem: Callable[["Subject"], str | None]
    remedy: str


class Outputs(NamedTuple):
    """Outputs of a subject's program."""

    losses: list[tuple[Any, Any]]  # (loss, gradients) of both models
    logits: np.ndarray  # of `variants`, [B, T, V]
    decoded: tuple[np.ndarray, ...] | None  # of prompts and subsequent steps; None: cannot decode
    fell: float  # measured loss decrease along the gradient, relative to the predicted one


class Subject:
    """A small model, also with the other scan_layers and full remat."""

    def __init__(self, load_config: Callable[..., Config], *, decodes: bool = True):
        """Compiles nothing yet. `load_config` maps keys to a configuration."""
        self.load_config = load_config
        self.decodes = decodes
        self.config = config = load_config()
        scans = config.model.memory.scan_layers
        model = config.model
        can_scan = model.layer_plan.repeats > 0 and model.scan_unsupported_reason is None
        other = load_config(scan_layers=can_scan and not scans, remat_policy="full")
        self.models = [Model(config.model), Model(other.model)]
        self.batch = random_batch(config, 2)
        # This PRNG implementation compiles fast.
        self.key = jax.random.key(1, impl="unsafe_rbg") if config.model.is_random else None

    @functools.cached_property
    def params(self) -> Parameters:
        """Random parameters of trained magnitude, also for zero-initialized ones."""
        generator = np.random.default_rng(0)

        def draw(path, leaf):
            scale = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
            return (scale + 0.2 * generator.normal(size=leaf.shape)).astype(leaf.dtype)

        return jax.tree_util.tree_map_with_path(draw, self.models[0].abstract)

    @functools.cached_property
    def traced(self) -> Any:
        return jax.jit(self._program).trace(self.models[0].abstract)

    @property
    def operations(self) -> list[int]:
        """Matrix product FLOPs of both losses with their gradients."""
        calls = [equation.params for equation in self.traced.jaxpr.eqns]
        return [products(one["jaxpr"].jaxpr) for one in calls if one.get("name") == "loss"]

    @functools.cached_property
    def outputs(self) -> Outputs:
        run = self.traced.lower().compile()
        losses, logits, decoded = jax.tree.map(np.asarray, run(self.params))
        loss, gradients = losses[0]
        square = sum(np.sum(np.square(gradient)) for gradient in jax.tree.leaves(gradients))
        fall = 0.003  # so small that the loss is linear
        moved = jax.tree.map(lambda x, dx: x - fall / square * dx, self.params, gradients)
        fell = float(loss - run(moved)[0][0][0]) / fall
        return Outputs(losses, logits, decoded, fell)

    def loss(self, params: Parameters, model: Model, batch: Batch) -> jax.Array:
        sums = loss_sums(
            model.merge(params), batch, model.config.objective, self.key, training=True
        )
        return sum(sums.means(batch.loss_mask_BT.sum(), num_tokens(batch)).values())  # type: ignore

    def _program(self, params: Parameters) -> Any:
        def loss(params, model):
            return self.loss(params, model, self.batch)

        losses = [
            jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, model)
            for model in self.models
        ]
        logits = _logits(self.models[0], params, variants())
        tokens_BT = variants().tokens_BT[3:5]
        decoded = _decoded(self.models[0].merge(params), tokens_BT) if self.decodes else None
        return losses, logits, decoded


def random_batch(config: Config, num_rows: int, seed: int = 0, *, documents: bool = True) -> Batch:
    """Returns random tokens and 0/1 weights, optionally two documents per row."""
    generator = np.random.default_rng(seed)
    length = config.model.shape.max_target_length
    shape = (num_rows, length)
    cut = length // 3
    tokens = generator.integers(0, config.model.shape.vocab_size, (num_rows, length + 1))
    tokens = tokens.astype(np.int32)
    weights = (generator.random(shape) < 0.7).astype(np.float32)
    positions = segments = None
    if documents:
        places = np.tile(np.arange(length, dtype=np.int32), (num_rows, 1))
        segments = np.where(places < cut, 1, 2).astype(np.int32)
        positions = np.where(places < cut, places, places - cut)
    return jax.tree.map(
        jnp.asarray, Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, segments)
    )


def variants() -> Batch:
    """Returns related sequences, [7, LENGTH].

    Two packed documents; one token changed in the first, then in the second; each document alone,
    followed by other tokens; the first followed by two kinds of padding.
    """
    tokens, more = np.random.default_rng(1).integers(0, 32, (2, LENGTH))
    first = tokens.copy()
    second = tokens.copy()
    padded = tokens.copy()
    first[CUT - 2] ^= 1
    second[CUT + 2] ^= 1
    padded[CUT:] ^= 3
    alone = [np.append(part, more)[:LENGTH] for part in (tokens[:CUT], tokens[CUT:])]
    rows = np.stack([tokens, first, second, *alone, tokens, padded]).astype(np.int32)
    places = np.arange(LENGTH, dtype=np.int32)
    behind = (places >= CUT).astype(int)
    segments = np.stack([1 + behind] * 3 + [np.ones(LENGTH, int)] * 2 + [1 - behind] * 2)
    positions = np.stack([places - CUT * behind] * 3 + [places] * 2 + [places - CUT * behind] * 2)
    weights = np.ones(rows.shape, np.float32)
    return Batch(rows, rows, weights, positions.astype(np.int32), segments.astype(np.int32))


def _logits(model: Model, params: Parameters, batch: Batch) -> jax.Array:
    decoder = model.merge(params)
    h_BTD, _ = decoder.hidden_states(batch, drops_tokens=False)
    return decoder.logits(h_BTD, decoder.head_state(h_BTD, batch))


def _decoded(decoder: Any, tokens_BT: Any) -> tuple[jax.Array, jax.Array]:
    """Returns logits of prompts, and of the next tokens one by one."""
    lengths_B = jnp.asarray(LENGTHS)
    tokens_BT = jnp.asarray(tokens_BT)
    padded_BT = jnp.where(jnp.arange(PROMPT) < lengths_B[:, None], tokens_BT[:, :PROMPT], 31)
    h_BTD, states = decoder.prefill(padded_BT, lengths_B, capacity=LENGTH)
    prompt = decoder.logits(h_BTD, states[-1])

    def step(states, place):
        positions_B1 = (lengths_B + place)[:, None]
        new_B1 = jnp.take_along_axis(tokens_BT, positions_B1, axis=1)
        h_B1D, states = decoder.decode_step(new_B1, positions_B1, states)
        return states, decoder.logits(h_B1D, states[-1], positions_B1)[:, 0]

    _, steps = jax.lax.scan(step, states, jnp.arange(LENGTH - PROMPT))
    return prompt, jnp.moveaxis(steps, 0, 1)


def products(jaxpr: Any) -> int:
    """Returns the matrix product FLOPs of a jaxpr, with scans multiplied out."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            outputs = math.prod(equation.outvars[0].aval.shape)
            total += 2 * outputs * math.prod(left[dimension] for dimension in contracted)
        if equation.primitive.name == "ragged_dot_general":
            # Each row of the left times one matrix, or rows of both sides contracted.
            left = equation.invars[0].aval
            outputs = equation.outvars[0].aval
            total += 2 * left.size * outputs.shape[-1]
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += times * products(inner)
    return total


def _by_name(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {leaf_path(path): np.asarray(leaf) for path, leaf in leaves}


def _pairs(tree: Any, other: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    others = _by_name(other)
    return ((name, leaf, others[name]) for name, leaf in _by_name(tree).items())


def _difference(found: Any, wanted: Any, of_loss: float, of_gradients: float) -> str | None:
    """Describes the first relative error of (loss, gradients) above its bound."""
    (other, others) = found
    (loss, gradients) = wanted
    if not abs(other - loss) <= of_loss * abs(loss):
        return f"the loss is {other:.7f} instead of {loss:.7f}"
    for name, expected, actual in _pairs(gradients, others):
        error = np.abs(actual - expected).max() / (np.abs(expected).max() or 1.0)
        if not error <= of_gradients:
            return f"the gradient of {name} differs by {error:.1e} of its largest number"
    return None


def _initialization(subject: Subject) -> str | None:
    draws = (jax.jit(_trainer(subject.config)[1])(jax.random.key(0)) for _ in range(2))
    for name, numbers, again in _pairs(*draws):
        if not np.isfinite(numbers).all():
            return f"{name} does not start with finite numbers"
        if not np.array_equal(numbers, again):
            return f"{name} differs between two initializations from one key"
    return None


def _axes(subject: Subject) -> str | None:
    known = {name for name, _ in subject.config.mesh.logical_axis_rules}
    for name, spec in subject.models[0].parameters.items():
        for axis in spec.logical_axes:
            if axis not in (None, *known):
                return f"{name} has the logical axis {axis!r}, which is not in logical_axis_rules"
    return None


def _causality(subject: Subject) -> str | None:
    logits = subject.outputs.logits
    for row, place, end in ((1, CUT - 2, CUT), (2, CUT + 2, LENGTH)):
        changed = np.any(logits[row] != logits[0], axis=-1)
        if changed[:place].any():
            early = place - int(np.argmax(changed))
            return f"a token changes the output of tokens up to {early} before it"
        # Reductions over a whole sequence may round differently.
        if np.abs(logits[row] - logits[0])[end:].max(initial=0) > 2e-5:
            return "a token changes the output of another document behind it"
        if not changed[place]:
            return "a token has no effect on its own output"
    return None


def _documents(subject: Subject) -> str | None:
    packed, first, second = subject.outputs.logits[[0, 3, 4]]
    alone = np.concatenate([first[:CUT], second[:-CUT]])
    error = np.abs(packed - alone).max()
    if error <= 2e-5:
        return None
    return f"logits of packed documents differ from those of documents alone by {error:.1e}"


def _padding(subject: Subject) -> str | None:
    one, other = subject.outputs.logits[[5, 6], :CUT]
    return None if np.array_equal(one, other) else "padding changes the output of tokens before it"


def _decoding(subject: Subject) -> str | None:
    if subject.outputs.decoded is None:
        return None
    rows = zip(LENGTHS, subject.outputs.logits[3:], *subject.outputs.decoded, strict=False)
    for length, full, prompt, steps in rows:
        error = np.abs(prompt[:length] - full[:length]).max()
        if not error <= 1e-4:
            return f"prefill of {length} tokens differs from the full forward pass by {error:.1e}"
        errors = np.abs(steps - full[length : length + len(steps)]).max(-1)
        if not errors.max() <= 1e-4:
            where = int(np.argmax(~(errors <= 1e-4)))
            return (
                f"token {where + 1} after a prompt of {length} differs from the full forward pass "
                f"by {errors[where]:.1e}"
            )
    return None


def _gradients(subject: Subject) -> str | None:
    for name, gradient in _by_name(subject.outputs.losses[0][1]).items():
        if not np.isfinite(gradient).all():
            return f"the gradient of {name} is not finite"
        if not np.any(gradient):
            return f"{name} has no gradient"
    if subject.config.model.attention.static_sgu:
        return None  # blocks gradients
    if not abs(subject.outputs.fell - 1) < 0.2:
        return f"the loss falls {subject.outputs.fell:.2f} times as far as the gradient says"
    return None


def _scan_and_remat(subject: Subject) -> str | None:
    wanted, found = subject.outputs.losses
    problem = _difference(found, wanted, 1e-6, 2e-5)
    return problem and f"with the other scan_layers and full remat, {problem}"


def _policies(subject: Subject) -> str | None:
    """Compares gradients with the policy of most saved values."""
    tags = set(re.findall(r"\bname\[name=(\w+)\]", str(subject.traced.jaxpr)))
    policy = max(SAVED_NAMES, key=lambda policy: len(tags.intersection(SAVED_NAMES[policy])))
    model = Model(subject.load_config(remat_policy=policy).model)
    loss = functools.partial(subject.loss, model=model, batch=subject.batch)
    found = jax.jit(jax.value_and_grad(loss))(subject.params)
    problem = _difference(found, subject.outputs.losses[0], 1e-6, 5e-5)
    return problem and f"with remat_policy={policy}, {problem}"


def _flops(subject: Subject) -> str | None:
    if subject.config.model.dense_connections.dense_conn:
        return None  # its sums are not dot_general in the jaxpr
    for actual, model in zip(subject.operations, subject.models, strict=True):
        formula = count_flops(model, LENGTH).executed_per_token or 0.0
        formula *= subject.batch.tokens_BT.size
        if abs(formula - actual) > 0.01 * actual:
            return f"by formula {formula:,.0f} operations, in the program {actual:,}"
    return None


def _formats(subject: Subject) -> str | None:
    """Checks dtypes in bfloat16 and decode state shapes abstractly."""
    model = Model(subject.load_config(dtype="bfloat16").model)

    def outputs(params: Parameters) -> tuple[Any, Any]:
        hidden, _ = model.merge(params).hidden_states(variants())
        return hidden, _logits(model, params, variants())

    hidden, logits = jax.eval_shape(outputs, model.abstract)
    if (hidden.dtype, logits.dtype) != (jnp.bfloat16, jnp.float32):
        return (
            f"hidden states are {hidden.dtype} and logits {logits.dtype}, not bfloat16 and float32"
        )
    if not subject.decodes:
        return None

    def states(params: Parameters) -> tuple[Any, ...]:
        decoder = model.merge(params)
        tokens = jnp.zeros((2, PROMPT), int)
        lengths = jnp.full(2, PROMPT)
        _, small = decoder.prefill(tokens, lengths, LENGTH // 2)
        _, large = decoder.prefill(tokens, lengths, LENGTH)
        _, after = decoder.decode_step(tokens[:, :1], lengths[:, None], large)
        return resize(small, LENGTH), large, after

    grown, large, after = map(jax.tree.leaves, jax.eval_shape(states, model.abstract))
    if after != large:
        return "the decode state changes its shapes or formats from token to token"
    if grown != large:
        return "an array of the decode state grows with context.capacity outside a KeyValueCache"
    return None


def _bfloat16(subject: Subject) -> str | None:
    model = Model(subject.load_config(dtype="bfloat16").model)
    logits = jax.jit(lambda params: _logits(model, params, variants()))(subject.params)
    # Of all tokens: in a single one, states that nearly cancel leave little but rounding.
    wanted = subject.outputs.logits
    error = np.linalg.norm(logits - wanted) / np.linalg.norm(wanted)
    return None if error < 0.1 else f"logits differ from those in float32 by {error:.0%}"


def _devices(subject: Subject) -> str | None:
    """Compares loss and gradients on several meshes with one device."""
    devices = jax.devices()
    if len(devices) < 8:
        return None
    batch = random_batch(subject.config, 8)
    loss = functools.partial(subject.loss, model=subject.models[0], batch=batch)
    wanted = jax.jit(jax.value_and_grad(loss))(subject.params)
    for sizes in MESHES:
        config = subject.load_config(**sizes)
        sharding = make_sharding_plan(config.mesh, devices[:8])
        model = Model(config.model)
        shardings = sharding.abstract_state(model.initialize, model.parameters)
        params = jax.tree.map(
            lambda x, to: jax.device_put(x, to.sharding), subject.params, shardings
        )
        placed = sharding.to_global_batch(jax.tree.map(np.asarray, batch), 8)
        loss = functools.partial(subject.loss, model=model, batch=placed)
        found = sharding.jit(jax.value_and_grad(loss))(params)
        if problem := _difference(found, wanted, 1e-5, 1e-4):
            return f"with {to_yaml(sizes)}, {problem}"
    return None


def _trainer(config: Config) -> tuple[Model, Callable[..., Any], Callable[..., Any]]:
    """Returns a model, its train state initializer and its train step."""
    model = Model(config.model)
    schedule = learning_rate_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, model.parameters)
    step = make_train_step(model, optimizer, schedule)
    return model, make_initialize(model, optimizer), step


def _resume(subject: Subject) -> str | None:
    """Checks a step from a saved state for equal bits in a new program."""
    config = subject.load_config(learning_rate=0.01, steps=4)
    _, initialize, step = _trainer(config)
    step = jax.jit(step)
    state, _ = step(jax.jit(initialize)(jax.random.key(0)), subject.batch)
    saved = jax.tree.map(np.asarray, state)
    continued, _ = step(state, subject.batch)
    again = jax.jit(_trainer(config)[2])
    resumed, _ = again(jax.tree.map(jnp.asarray, saved), subject.batch)
    for name, numbers, others in _pairs(continued, resumed):
        if not np.array_equal(numbers, others):
            return f"{name} differs after a resumed step"
    return None


def _growth(subject: Subject) -> str | None:
    """Doubles layers, slots and every size key of the part itself."""
    values = flatten(subject.config)
    arrays = _by_name(subject.params)
    read = arrays.__getitem__
    metadata = {"config": values}
    source = SourceCheckpoint("SMALL", None, metadata, array_specs(arrays), read)
    own = (item for section in subject.config.model.parts.sections for item in section)
    sizes = [name for name, value in own if type(value) is int]
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
        logits = jax.jit(functools.partial(_logits, model))(params, variants())
        error = np.abs(logits - subject.outputs.logits).max()
        if not error <= 2e-5:
            return f"growth to {name}={size} is not refused, and changes logits by {error:.1e}"
    return None


def _updates(subject: Subject) -> str | None:
    """Checks steps: finite, moving all parameters, reducing the loss."""
    _, initialize, step = _trainer(subject.load_config(learning_rate=0.003, steps=8))
    step = jax.jit(step)
    first = jax.jit(initialize)(jax.random.key(0))
    state = first
    losses = []
    for _ in range(8):
        state, metrics = step(state, subject.batch)
        losses.append(float(metrics["loss"]))
    for name, old, new in _pairs(first, state):
        if not np.isfinite(new).all():
            return f"{name} is not finite after 8 steps"
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            return f"{name} was {old.dtype}{old.shape}, and is {new.dtype}{new.shape} now"
    for name, old, new in _pairs(first.params, state.params):
        if np.array_equal(old, new):
            return f"{name} does not change"
    if not losses[-1] < losses[0]:
        return f"the loss goes from {losses[0]:.4f} to {losses[-1]:.4f} in 8 steps on one batch"
    return None


def _step_on_devices(subject: Subject) -> str | None:
    """Compares updates of two steps on several meshes with one device."""
    devices = jax.devices()
    batch = random_batch(subject.config, 8)
    if len(devices) < 8:
        return None

    def moved(**sizes: int) -> dict[str, np.ndarray]:
        config = subject.load_config(learning_rate=0.01, steps=4, **sizes)
        sharding = make_sharding_plan(config.mesh, devices[: math.prod(sizes.values())])
        model, initialize, step = _trainer(config)
        abstract = sharding.abstract_state(initialize, model.parameters)
        state = sharding.init_state(initialize, abstract, 0)
        before = jax.tree.map(np.asarray, state.params)
        placed = sharding.to_global_batch(jax.tree.map(np.asarray, batch), 8)
        shapes = sharding.abstract_batch(jax.eval_shape(lambda: placed))
        step, _ = sharding.compile_step(step, abstract, shapes)
        for _ in range(2):
            state, _ = step(state, placed)
        return {name: after - old for name, after, old in _pairs(state.params, before)}

    wanted = moved()
    for sizes in MESHES:
        found = moved(**sizes)
        for name, numbers in wanted.items():
            # On average, because normalized updates magnify rounding of small gradients.
            error = np.abs(found[name] - numbers).mean() / np.abs(numbers).mean()
            if not error <= 0.02:
                return f"with {to_yaml(sizes)}, updates of {name} differ by {error:.0%}"
    return None


CHECKS = (
    Check("initialization", _initialization, "draw every weight from rngs, by an initializer"),
    Check("logical axes", _axes, "use names of logical_axis_rules, or add a rule for the axis"),
    Check("causality", _causality, "a token may see earlier tokens of its own segment only"),
    Check("documents", _documents, "reset the state where context.segments_BT changes"),
    Check("padding", _padding, "a token may not see tokens of another segment, or padding"),
    Check("gradients", _gradients, "is a weight unused, or behind stop_gradient?"),
    Check("scan and remat", _scan_and_remat, "keep nothing on self; draw from context.key_for()"),
    Check("remat policies", _policies, "tag() only values that depend on nothing but the inputs"),
    Check("decode state", _decoding, "prefill and decode_step have to agree with __call__"),
    Check("FLOPs", _flops, "flops() counts the products besides those of weights"),
    Check("formats", _formats, "the output has the format of x, a state always the same"),
    Check("bfloat16", _bfloat16, "sums, norms and softmax in float32"),
    Check("8 devices", _devices, "no sizes of one device; with_logical_constraint() activations"),
    Check("resume", _resume, "everything that training changes has to be a weight"),
    Check("growth", _growth, "an axis is slots only where a slot with key 0 adds nothing"),
)
# Checks of an optimizer.
OPTIMIZER_CHECKS = (
    Check("initialization", _initialization, "init() depends on the parameters alone"),
    Check("updates", _updates, "update() returns a direction that is subtracted, in its format"),
    Check("8 devices", _step_on_devices, "no sizes of one device in the code"),
    Check("resume", _resume, "everything that update() changes has to be in its state"),
)


def result(check: Check, subject: Subject) -> str | None:
    """Returns the problem of a subject; an exception counts as one."""
    try:
        return check.problem(subject)
    except Exception as error:  # a part can raise anything
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
