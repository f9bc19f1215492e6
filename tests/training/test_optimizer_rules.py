"""Optimizers over 20 steps, against NumPy programs written from the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from MaxText.errors import UserError
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.training.optimizer import make_optimizer
from MaxText.training.optimizers.muon import newton_schulz
from MaxText.training.optimizers.parameter_trees import map_param_names
from MaxText.training.schedule import learning_rate_schedule, weight_decay_schedule
from tests.growth.growing import by_name
from tests.small_models import tiny_config

STEPS = 20
RATE, DECAY = 0.03, 0.1
B1, B2, EPS = 0.8, 0.9, 1e-4
BETA = 0.7
WIDE, TALL, SQUARE = "layers/wi/kernel", "layers/wo/kernel", "layers/out/kernel"
HEAD, NORM = "logits/kernel", "norm/scale"
SPECS = {
    WIDE: ParamSpec((2, 6, 2, 5), jnp.float32, ("layers", "embed", "mlp", None), 1),
    TALL: ParamSpec((2, 9, 6), jnp.float32, ("layers", "mlp", "embed"), 1),
    SQUARE: ParamSpec((2, 6, 6), jnp.float32, ("layers", None, "embed"), 1),
    HEAD: ParamSpec((6, 12), jnp.float32, ("embed", "vocab"), 1),
    NORM: ParamSpec((6,), jnp.float32, ("norm",), 0),
}
KEYS = {
    "lr_schedule_type": "linear",
    "learning_rate": RATE,
    "steps": STEPS,
    "warmup_steps": 0,
    "learning_rate_final_fraction": 0.5,
    "adam_weight_decay": DECAY,
    "gradient_clipping_threshold": 0.0,
    "adam_b1": B1,
    "adam_b2": B2,
    "adam_eps": EPS,
    "muon_beta": BETA,
}


def arrays(seed):
    """An array for each parameter: random, of rows and columns of unlike size."""
    draw = np.random.default_rng(seed).normal
    return {
        name: draw(size=spec.shape) * (1 + np.arange(spec.shape[-1])) / spec.shape[-1]
        for name, spec in SPECS.items()
    }


def train(**keys):
    """Parameters by name after 20 steps, of gradients that do not depend on them; and the state."""
    config = tiny_config(**KEYS | keys)
    schedule = learning_rate_schedule(config.schedule)
    decay_schedule = weight_decay_schedule(config.schedule)
    optimizer = make_optimizer(config.optimizer, schedule, SPECS, decay_schedule)

    def tree(values):
        return map_param_names(SPECS, lambda name: jnp.float32(values[name]))

    @jax.jit
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = tree(arrays(0))
    state = optimizer.init(params)
    for number in range(STEPS):
        params, state = step(params, state, tree(arrays(1 + number)))
    return {name: np.asarray(value) for name, value in by_name(params).items()}, state


def rate_of(step):
    return RATE * (1 - 0.5 * step / STEPS)


# --- NumPy programs: generators of directions from the gradients of one matrix or vector


def adam(gradients, nesterov=False):
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        first = m / (1 - B1**t)
        if nesterov:
            first = B1 * m / (1 - B1 ** (t + 1)) + (1 - B1) * g / (1 - B1**t)
        yield first / (np.sqrt(v / (1 - B2**t)) + EPS)


def orthogonal(x, coefficients, margin):
    x = x / (margin * np.linalg.norm(x) + EPS)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


JORDAN = [(3.4445, -4.7750, 2.0315)] * 5
POLAR_EXPRESS = [  # Amsel et al. 2025, rounded
    (8.1566, -22.4833, 15.8788),
    (4.0429, -2.8089, 0.5),
    (3.8917, -2.7725, 0.5061),
    (3.2858, -2.3681, 0.4645),
    (2.3465, -1.7098, 0.4232),
]


def muon(gradients, coefficients=JORDAN, margin=1.0):
    m = 0.0
    for t, g in enumerate(gradients, 1):
        m = BETA * m + (1 - BETA) * g
        look_ahead = BETA * m / (1 - BETA ** (t + 1)) + (1 - BETA) * g / (1 - BETA**t)
        yield orthogonal(look_ahead, coefficients, margin)


def polar_muon(gradients):
    return muon(gradients, POLAR_EXPRESS, 1.01)


def normuon(gradients, beta2=0.6):
    v = 0.0
    for u in muon(gradients):
        v = beta2 * v + (1 - beta2) * (u**2).mean(0)  # of each output, a column here
        normalized = u / np.sqrt(v)
        yield normalized * np.linalg.norm(u) / np.linalg.norm(normalized)


def soap(gradients, beta=0.75, frequency=3, sides=(True, True)):
    """The reference program's order of operations (Vyas et al. 2025, algorithm 3 and 4)."""
    statistics, bases, v, m = [0.0, 0.0], None, 0.0, 0.0
    for t, g in enumerate(gradients):
        direction = np.zeros_like(g)
        if t:
            left, right = bases
            m = B1 * m + (1 - B1) * g
            v = B2 * v + (1 - B2) * (left.T @ g @ right) ** 2
            rotated = (left.T @ m @ right) / (1 - B1**t)
            direction = left @ (rotated / (np.sqrt(v / (1 - B2**t)) + EPS)) @ right.T
        products = (g @ g.T, g.T @ g)
        statistics = [beta * s + (1 - beta) * p for s, p in zip(statistics, products, strict=True)]
        if bases is None:
            bases = [np.linalg.eigh(s)[1][:, ::-1] for s in statistics]
        elif t % frequency == 0:
            for side in range(2):
                order = np.argsort(-np.diag(bases[side].T @ statistics[side] @ bases[side]))
                if sides[side]:
                    bases[side] = np.linalg.qr(statistics[side] @ bases[side][:, order])[0]
                    v = v[order] if side == 0 else v[:, order]
        bases = [
            basis if has_basis else np.eye(len(basis))
            for basis, has_basis in zip(bases, sides, strict=True)
        ]
        yield direction


def one_sided_soap(gradients):
    return soap(gradients, sides=(gradients[0].shape[0] <= 8, gradients[0].shape[1] <= 8))


def lion(gradients):
    m = 0.0
    for g in gradients:
        yield np.sign(B1 * m + (1 - B1) * g)
        m = B2 * m + (1 - B2) * g


def adopt(gradients, b1=0.9, b2=0.9999, eps=1e-6):
    """Taniguchi et al. 2024, algorithm 2: the second moment is that before the gradient."""
    m, v = 0.0, None
    for t, g in enumerate(gradients):
        if v is None:
            v = g * g
            yield np.zeros_like(g)
            continue
        m = b1 * m + (1 - b1) * np.clip(g / np.maximum(np.sqrt(v), eps), -(t**0.25), t**0.25)
        v = b2 * v + (1 - b2) * g * g
        yield m


# --- The loop of a run: decay, learning rate, projection


def decayed(w, u, step, decay=DECAY):
    return w - rate_of(step) * (u + decay * w)


def cautiously_decayed(w, u, step):
    return w - rate_of(step) * (u + DECAY * np.where(u * w >= 0, w, 0))


def less_decayed(w, u, step):
    return decayed(w, u, step, DECAY * (1 - 0.75 * step / STEPS))


def on_sphere(w, u, step):
    radius = np.linalg.norm(w)
    moved = w - rate_of(step) * radius * u / np.linalg.norm(u)
    return radius * moved / np.linalg.norm(moved)


def expected(name, rule, apply, scale=lambda inputs, outputs: 1.0):
    """Parameter after 20 steps: each layer on its own, as a matrix [inputs, outputs]."""
    spec = SPECS[name]
    initial, *gradients = (arrays(seed)[name] for seed in range(STEPS + 1))
    if not spec.num_input_dims:
        layers = [(initial, gradients)]
    else:
        count = spec.shape[0] if spec.logical_axes[0] == "layers" else 1
        inputs = spec.shape[1] if count > 1 else spec.shape[0]

        def matrices(x):
            return x.reshape(count, inputs, -1)

        layers = [
            (matrices(initial)[layer], [matrices(g)[layer] for g in gradients])
            for layer in range(count)
        ]
    results = []
    for w, of_layer in layers:
        for step, u in enumerate(rule(of_layer)):
            w = apply(w, u * (scale(*w.shape) if w.ndim == 2 else 1.0), step)
        results.append(w)
    return np.stack(results).reshape(spec.shape)


def rms(inputs, outputs):
    return 0.2 * np.sqrt(max(inputs, outputs))


def original(inputs, outputs):
    return np.sqrt(max(1, outputs / inputs))


def spectral(inputs, outputs):
    return np.sqrt(outputs / inputs)


def nesterov_adam(gradients):
    return adam(gradients, nesterov=True)


SOAP = {"opt_type": "soap", "soap.beta": 0.75, "soap.frequency": 3}
OPTAX = {"opt_type": "optax"}
ALL = tuple(SPECS)
MATRICES, OTHERS = (WIDE, TALL, SQUARE), (HEAD, NORM)


@pytest.mark.parametrize(
    ("keys", "of_names"),
    [
        (
            {"opt_type": "muon", "muon_scale": "original"},
            {MATRICES: (muon, decayed, original), OTHERS: (nesterov_adam, decayed)},
        ),
        (
            {"opt_type": "muon", "muon_scale": "spectral", "muon_coefficients": "polar_express"},
            {MATRICES: (polar_muon, decayed, spectral), OTHERS: (nesterov_adam, decayed)},
        ),
        (
            {"opt_type": "normuon", "normuon_beta2": 0.6},
            {MATRICES: (normuon, decayed, rms), OTHERS: (nesterov_adam, decayed)},
        ),
        (
            {"opt_type": "muonh"},
            {MATRICES: (muon, on_sphere), (HEAD,): (adam, on_sphere), (NORM,): (adam, decayed)},
        ),
        ({"opt_type": "adamh"}, {(*MATRICES, HEAD): (adam, on_sphere), (NORM,): (adam, decayed)}),
        # Shorter sides alone: the longer one's statistics have eigenvalues of 0, whose vectors are
        # any.
        (SOAP, {(SQUARE,): (soap, decayed), OTHERS: (adam, decayed)}),
        (SOAP | {"soap.max_side": 8}, {MATRICES: (one_sided_soap, decayed)}),
        ({"opt_type": "lion", "cautious_weight_decay": True}, {ALL: (lion, cautiously_decayed)}),
        (
            {"weight_decay_schedule_type": "linear", "weight_decay_final_fraction": 0.25},
            {ALL: (adam, less_decayed)},
        ),
        (OPTAX | {"optax_name": "adopt"}, {ALL: (adopt, decayed)}),
        (OPTAX | {"optax_name": "lion", "optax_options": [["b1", B1], ["b2", B2]]},
         {ALL: (lion, decayed)}),
    ],
)  # fmt: skip
def test_twenty_steps_are_those_of_the_papers(keys, of_names):
    params, _ = train(**keys)
    for names, arguments in of_names.items():
        for name in names:
            np.testing.assert_allclose(
                params[name], expected(name, *arguments), rtol=2e-3, atol=5e-4, err_msg=name
            )


def test_ademamix_is_that_of_optax():
    """Pagliardini et al. 2024: (m1 + alpha m2) / sqrt(v), with the chain's decay and rate."""
    options = {"b1": B1, "b2": B2, "b3": 0.95, "alpha": 3.0}
    params, _ = train(**OPTAX, optax_name="ademamix", optax_options=[*options.items()])

    def ademamix(gradients):
        m1 = m2 = v = 0.0
        for t, g in enumerate(gradients, 1):
            m1, m2 = B1 * m1 + (1 - B1) * g, 0.95 * m2 + 0.05 * g
            v = B2 * v + (1 - B2) * g * g
            yield (m1 / (1 - B1**t) + 3 * m2) / (np.sqrt(v / (1 - B2**t)) + 1e-8)

    np.testing.assert_allclose(params[WIDE], expected(WIDE, ademamix, decayed), rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"optax_name": "schedule_free"}, "it owns the learning rate.*parameter_average"),
        ({"optax_name": "adop"}, "has no rule scale_by_adop.*ademamix, adopt"),
        ({"optax_name": "adopt", "optax_options": [["beta", 0.9]]}, "do not fit.*scale_by_adopt"),
    ],
)
def test_unusable_rules_of_optax_are_refused(keys, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        train(**OPTAX, **keys)


def test_matrices_keep_their_norms():
    for opt_type in ("adamh", "muonh"):
        params, _ = train(opt_type=opt_type)
        for name in (*MATRICES, HEAD):
            axes = tuple(range(1 if name in MATRICES else 0, params[name].ndim))
            norms = [np.sqrt((x**2).sum(axes)) for x in (params[name], arrays(0)[name])]
            np.testing.assert_allclose(*norms, rtol=1e-5)


def test_singular_values_of_polar_express():
    """Closer to 1 than Jordan's coefficients, which end between 0.68 and 1.13."""
    x = jax.random.normal(jax.random.key(0), (3, 48, 64))
    values = {
        name: np.linalg.svd(newton_schulz(x, name, 1e-8), compute_uv=False)
        for name in ("standard", "polar_express")
    }
    assert np.all(np.abs(values["polar_express"] - 1) < 0.15)
    assert np.abs(values["standard"] - 1).max() > 0.2


def test_coefficients_and_scales_keep_the_layout_of_checkpoints():
    def layout(**keys):
        config = tiny_config(**KEYS | keys, opt_type="muon")
        optimizer = make_optimizer(config.optimizer, lambda step: 0.1, SPECS)
        params = map_param_names(SPECS, lambda name: jnp.zeros(SPECS[name].shape))
        state = jax.eval_shape(optimizer.init, params)
        return jax.tree.structure(state), [x.shape for x in jax.tree.leaves(state)]

    assert layout() == layout(muon_coefficients="polar_express", muon_scale="spectral")
    assert layout() == layout(weight_decay_schedule_type="cosine", cautious_weight_decay=True)
