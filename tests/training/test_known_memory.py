"""What cannot fit is refused before arrays are made."""

import jax
import pytest

from MaxText.checkpointing.growth.settling import Settled
from MaxText.errors import UserError
from MaxText.input_pipeline.rows.batch_plan import BatchPlan
from MaxText.parallelism import mesh
from MaxText.training import known_memory
from MaxText.training.assembly import assemble
from tests.small_models import tiny_config


@pytest.fixture(scope="module")
def built():
    config = tiny_config()
    layout = mesh.make_layout(config.mesh, jax.devices()[:1], config.model.pipeline)
    return assemble(Settled(config), layout)


def check(built, rows, memory, monkeypatch, microbatches=1):
    monkeypatch.setattr(known_memory, "memory_of", lambda device: memory)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    known_memory.check_known_memory(built, BatchPlan.constant(rows, 16), 1, microbatches)


def test_the_state_its_gradients_and_one_activation_must_fit(built, monkeypatch):
    parameters = 4 * built.model.num_parameters
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(built.state))
    width = built.model.section.shape.dimensions.emb_dim * 4
    needed = state + parameters + 8 * 16 * width
    check(built, 8, needed, monkeypatch)
    with pytest.raises(UserError, match=r"a step needs .* GiB at least .* this machine has"):
        check(built, 8, needed - 1, monkeypatch)
    check(built, 8, needed - 8 * 8 * width, monkeypatch, microbatches=2)
    check(built, 8, None, monkeypatch)


def test_a_cpu_device_has_the_memory_of_its_host():
    memory = known_memory.memory_of(jax.devices("cpu")[0])
    assert memory is not None
    assert memory > 2**28
