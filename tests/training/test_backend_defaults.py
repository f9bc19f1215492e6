"""What `auto` means on a GPU, and the XLA options of its steps."""

import jax
import pytest

from MaxText.parallelism.compiler_options import train_step_options
from MaxText.parallelism.mesh import make_sharding_plan
from MaxText.training.backend_defaults import GPU_UNROLLED_LAYERS, resolve_auto
from tests.small_models import tiny_config


@pytest.mark.parametrize("beyond", [0, 1])
def test_few_layers_are_unrolled_on_one_gpu(beyond):
    config = tiny_config(
        base_num_decoder_layers=GPU_UNROLLED_LAYERS + beyond,
        scan_layers="auto",
        attention="blocked",
    )
    sharding = make_sharding_plan(config.mesh, jax.devices()[:1])
    section, _ = resolve_auto(config.model, "gpu", sharding)
    assert section.memory.scan_layers is bool(beyond)


def test_options_of_the_user_win(monkeypatch):
    assert train_step_options("gpu", 1) == {"xla_gpu_enable_triton_gemm": False}
    assert not train_step_options("cpu", 1)
    assert not train_step_options("tpu", 1)
    (option,) = train_step_options("tpu", 8)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{option}=8")
    assert not train_step_options("tpu", 8)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert not train_step_options("gpu", 1)
    options = train_step_options("gpu", 8)
    monkeypatch.setenv("XLA_FLAGS", f"--{min(options)}=off --xla_gpu_enable_triton_gemm=true")
    assert len(train_step_options("gpu", 8)) == len(options) - 1 == 2
