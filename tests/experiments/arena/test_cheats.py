"""Ten cheats: each is refused with a reason that names it, or shown to be harmless.

Candidates run in this process here; a session gives each a process of its own.
"""

import importlib

import jax
import numpy as np
import pytest

from MaxText.config.loading import load_config
from MaxText.config.schema import flatten
from MaxText.config.serialization import diff_configs
from MaxText.conformance.subject import SIZES, TRAINED, random_batch
from MaxText.errors import UserError
from MaxText.experiments.arena import counted_cost, measurement, screening, text_overlap
from MaxText.experiments.arena.candidates import (
    CandidateRefusedError,
    closed_changes,
    configuration_hash,
    read_candidate,
)
from MaxText.experiments.arena.information_leaks import target_losses
from MaxText.experiments.arena.isolation import IsolationError
from MaxText.layers.assembly.model import Model

CHEATS = "tests/experiments/arena/cheats.py"
KEYS = SIZES | TRAINED | {"per_device_batch_size": 2, "base_num_decoder_layers": 1}


def config(**keys):
    return load_config(**KEYS | keys)


def cheat(mixer="honest_mean", **keys):
    return config(import_modules=[CHEATS], mixer=mixer, **keys)


def refusals(**keys):
    """Reasons to refuse a candidate that changes these keys."""
    return closed_changes(diff_configs(flatten(config()), flatten(config(**keys))))


def only_reason(reasons):
    (reason,) = reasons
    return reason


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads a candidate whose part is this source; ends its guard after the test."""
    candidates = []

    def read_source(source, *keys, name="part.py"):
        path = tmp_path / name
        path.write_text(source)
        candidates.append(read_candidate(" ".join([str(path), *keys]), config()))
        return candidates[-1]

    yield read_source
    for candidate in candidates:
        candidate.guard.watch.stop()


PART = """
import jax.numpy as jnp
from MaxText.layers.part import Mixer, register

@register("mixer", "{name}")
class Part(Mixer):
    def __init__(self, config, init, rngs):
        pass

    def __call__(self, x_BTD, context):
        {action}
        return jnp.zeros_like(x_BTD), {{}}
"""


def part(name, action="pass", before=""):
    return before + PART.format(name=name, action=action)


# 1. A table of n-grams of the training text


def test_a_table_of_ngrams_counts_as_parameters():
    baseline = counted_cost.count_cost(config(vocab_size=128))
    table = counted_cost.count_cost(cheat(head_type="bigrams", vocab_size=128, mixer="attention"))
    assert table.parameters > baseline.parameters + 128 * 100
    reasons = counted_cost.cost_reasons(table, baseline, ("parameters", "flops"), 0.02)
    assert "match=parameters" in reasons[0]


def test_a_table_that_is_no_weight_is_refused_and_counted():
    program = counted_cost.trace_program(cheat("table_in_the_program"))
    assert sum(array.size for array in program.constants) >= 640 * 640
    reasons = screening.program_reasons(cheat("table_in_the_program"))
    assert "holds arrays of 1,638,4" in only_reason(reasons)


# 2. A cache of exact matches of seen text


def test_a_cache_on_the_host_is_refused():
    reasons = screening.program_reasons(cheat("cache_on_the_host"))
    assert "runs Python on the host: pure_callback" in reasons[0]


def test_a_cache_read_from_a_file_is_refused(read, tmp_path):
    (tmp_path / "seen.txt").write_text("text")
    action = f"open({str(tmp_path / 'seen.txt')!r})"
    with pytest.raises(CandidateRefusedError, match=r"part.py:\d+ opened the file .*seen.txt"):
        read(part("reads_at_import", before=action))
    candidate = read(part("reads_in_a_trace", action), name="later.py")
    with pytest.raises(IsolationError, match=r"seen\.txt"):
        counted_cost.trace_program(candidate.config)
    assert "opened the file" in only_reason(candidate.guard.problems())


# 3. Reading the target through a shifted mask


def test_a_shifted_mask_is_found_and_an_honest_one_passes():
    assert "it sees later tokens" in screening.model_leaks(cheat("shifted_mask"))[0]
    honest = cheat(cross_document_attention=True)
    assert screening.model_leaks(honest) == []


def test_targets_are_not_given_to_the_measured_model():
    """A model that outputs the targets it is given predicts its own inputs instead."""
    model = Model(counted_cost.counted_config(config(dtype="float32")).model)
    batch = random_batch(config(), 2)

    class Reader:
        config = model.config

        def merge(self, params):
            return self

        def hidden_states(self, batch, drops_tokens):
            return jax.nn.one_hot(batch.targets_BT, 32), {}

        def head_state(self, h_BTD, batch):
            return None

        def logits(self, h_BTD, state):
            return 100 * h_BTD

    losses_BT = target_losses(Reader(), {}, batch)
    is_hit_BT = batch.tokens_BT == batch.targets_BT
    assert float(losses_BT[~is_hit_BT].min()) > 99


# 4. Validation text among the training files


class Tokens:
    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def read(self, start_P, stop_P):
        return self.ids[start_P[0] : stop_P[0]]


def test_validation_text_among_the_training_text_is_found(monkeypatch):
    generator = np.random.default_rng(0)
    training, validation = generator.integers(0, 50, (2, 4000))
    clean = text_overlap.find_overlap([Tokens(training)], [Tokens(validation)])
    assert (clean.num_windows, clean.num_found) == (4000 // text_overlap.WINDOW, 0)
    stolen = np.concatenate([training[:777], validation[:2000], training[777:]])
    found = text_overlap.find_overlap([Tokens(stolen)], [Tokens(validation)], chunk=1000)
    assert found.num_found == 2000 // text_overlap.WINDOW
    assert found.num_tokens >= len(stolen)
    monkeypatch.setattr(text_overlap, "open_sources", lambda *_: [])
    monkeypatch.setattr(text_overlap, "open_eval_sources", lambda *_: [])
    monkeypatch.setattr(text_overlap, "find_overlap", lambda *_: found)
    with pytest.raises(UserError, match="50% of the validation text"):
        text_overlap.check_validation_text(config(dataset_type="grain", dataset_path="data"))


def test_hashes_are_those_of_each_window():
    ids = np.random.default_rng(1).integers(0, 2**17, 50)
    window = text_overlap.WINDOW
    powers = [pow(text_overlap._BASE, i, 2**64) for i in range(window)]
    expected = [
        sum((int(x) + 1) * b for x, b in zip(ids[i : i + window], powers, strict=True)) % 2**64
        for i in range(len(ids) - window + 1)
    ]
    assert text_overlap.rolling_hashes(ids).tolist() == expected


# 5, 6, 8, 9: keys that belong to the session


@pytest.mark.parametrize(
    ("keys", "owned"),
    [
        ({"grain_train_files": "data/*", "dataset_type": "grain"}, "the data belong"),
        ({"tokenizer_path": "byte", "dataset_type": "grain"}, "the tokenizer belongs"),
        ({"vocab_size": 16}, "the tokenizer belongs"),
        ({"eval_steps": 1}, "the validation text and its length belongs"),
        ({"eval_half": "second"}, "the validation text and its length belongs"),
        ({"eval_split": "easy"}, "the validation text and its length belongs"),
        ({"zero_loss": False}, "which tokens count in the loss belongs"),
        ({"causal": False}, "which tokens count in the loss belongs"),
        ({"steps": 11}, "the length of the run belongs"),
        ({"learning_rate_schedule_steps": 100}, "the length of the run belongs"),
        ({"gradient_accumulation_steps": 2}, "the batch belongs"),
        ({"init_weights_seed": 7}, "the seeds belong"),
        ({"data_shuffle_seed": 7}, "the seeds belong"),
        ({"load_parameters_path": "trained"}, "the initial weights belong"),
        ({"hooks": ["mine"]}, "this key belongs"),
    ],
)
def test_keys_of_the_session_are_refused(keys, owned):
    try:
        reasons = refusals(**keys)
    except UserError:
        reasons = closed_changes({name: ("", str(value)) for name, value in keys.items()})
    assert any(owned in reason and next(iter(keys)) in reason for reason in reasons)


def test_keys_of_the_model_and_the_optimizer_are_open():
    assert refusals(base_mlp_dim=32, opt_type="sgd", learning_rate=0.5, dropout_rate=0.1) == []


def test_seeds_and_names_do_not_make_another_candidate():
    same = configuration_hash(config(run_name="other", init_weights_seed=9), {})
    assert same == configuration_hash(config(), {})
    assert configuration_hash(config(learning_rate=0.1), {}) != same
    assert configuration_hash(config(), {"part.py": "00"}) != same


def test_a_checkpoint_of_more_steps_is_refused():
    assert measurement.step_reasons("run/checkpoints/9", 10) == []
    assert "step 10" in only_reason(measurement.step_reasons("run/checkpoints/10", 10))


# 7. FLOPs that the part misreports


def test_products_that_are_not_declared_are_found():
    reason = counted_cost.misreported_flops(cheat("hidden_products"))
    assert reason is not None
    assert "FLOPs are misreported" in reason
    assert counted_cost.misreported_flops(cheat("honest_mean")) is None


def test_a_product_written_as_a_sum_of_products_costs_as_much():
    products = counted_cost.trace_program(cheat("honest_mean")).operations
    sums = counted_cost.trace_program(cheat("sum_of_products")).operations
    assert sums.matmul_flops < products.matmul_flops
    assert sums.flops == pytest.approx(products.flops, rel=0.01)


# 10. An edited loss


def test_a_replaced_loss_is_found(read):
    source = part(
        "edits_the_loss",
        before="""
from MaxText.training import objective
objective.cross_entropy = lambda logits, targets: (0.0 * logits.sum(-1), 0.0 * logits.sum(-1))
""",
    )
    objective = importlib.import_module("MaxText.training.objective")
    original = objective.cross_entropy
    try:
        candidate = read(source)
        assert "MaxText.training.objective.cross_entropy" in candidate.guard.problems()[0]
    finally:
        objective.cross_entropy = original
    assert candidate.guard.problems() == []


def test_a_candidates_own_loss_does_not_change_what_is_judged():
    """The judged loss is the cross entropy of the logits, whatever is minimized."""
    batch = random_batch(config(), 2)
    losses = []
    for keys in ({}, {"loss_type": "always_zero"}):
        model = Model(counted_cost.counted_config(cheat(**keys)).model)
        params = model.initialize(jax.random.key(0))
        losses.append(np.asarray(target_losses(model, params, batch)))
    np.testing.assert_array_equal(*losses)
    assert losses[0].min() > 0
