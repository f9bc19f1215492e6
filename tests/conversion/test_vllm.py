"""Exports opened by vLLM: its model classes, its loader, and the parameters that it then has.

vLLM runs on GPUs, but its loader runs on CPU, with gloo in place of NCCL; CONTRIBUTING.md has the
environment. What needs a compiled extension is missing there: attention over the cache, and the
experts of mixtures. Logits are therefore compared with attention written out in torch, which takes
its scale, window, soft cap, and numbers of heads from vLLM's layer; projections, norms, rotary
positions, feed-forwards, and the output head are vLLM's own. The token server is not started.
"""

import jax
import numpy as np
import pytest

from MaxText.conversion.families import FAMILIES
from MaxText.layers.batch import Batch
from MaxText.training.backend_defaults import abstract_model
from tests.conversion.golden_models import of_family_vectors
from tests.conversion.random_runs import write_random_run
from tests.conversion.running import parameters_in_run, run

vllm = pytest.importorskip("vllm", reason="needs vLLM, see CONTRIBUTING.md")
torch = pytest.importorskip("torch", reason="needs vLLM, see CONTRIBUTING.md")

# Warnings of vLLM and of its libraries are not this project's.
pytestmark = pytest.mark.filterwarnings("default")

LENGTH = 16
WINDOW = 5
MODELS = {
    "llama2": {},
    "mistral": {"mixer": "local_attention", "sliding_window_size": WINDOW},
    "qwen3": {"logits_via_embedding": True, "normalize_embedding_logits": False},
    "olmo2": {},
    "gemma3": {
        "sliding_window_size": WINDOW,
        "layer_pattern": "LLG",
        "layer_kinds": {
            "L": {"mixer": "local_attention", "rope_max_timescale": 100.0},
            "G": {"mixer": "attention", "rope_max_timescale": 5000.0},
        },
    },
}

# Of tests/golden/families: those whose layers run on CPU, without experts and recurrent mixers.
GOLDEN_CASES = (
    "arcee",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "granite",
    "hunyuan_v1_dense",
    "nanochat",
    "nemotron",
    "olmo3",
    "phi3",
    "seed_oss",
    "smollm3",
    "starcoder2",
)

# Families without a class or an entry in vLLM 0.33, which removed bamba in 0.23. It runs nanochat
# with the class of transformers, which it tries for names that it does not know.
NOT_IN_VLLM = {
    "bamba",
    "fattorib",
    "gpt_neo",
    "muddformer",
    "muddpythia",
    "nanochat",
    "tokenformer",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """vLLM on one CPU process, which writes its caches where tests may."""
    from vllm.distributed import init_distributed_environment
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.models import registry

    folder = tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        # A process per model class, which imports vLLM again, keeps CUDA out of this one.
        patch.setattr(registry, "_run_in_subprocess", lambda function: function())
        # As vLLM's CPU worker has it.
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        patch.setattr(Attention, "forward", causal_attention)
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{folder / 'rendezvous'}",
            backend="gloo",
        )
        yield
        cleanup_dist_env_and_memory()


def causal_attention(layer, query, key, value, **_):
    """Attention of one sequence [T, heads * head_dim] without a cache: vLLM's needs its kernel."""
    length = query.shape[0]
    queries_HTh = query.view(length, layer.num_heads, layer.head_size).transpose(0, 1)
    keys_KTh, values_KTh = (
        projected.view(length, layer.num_kv_heads, layer.head_size).transpose(0, 1)
        for projected in (key, value)
    )
    group_size = layer.num_heads // layer.num_kv_heads
    keys_HTh = keys_KTh.repeat_interleave(group_size, dim=0)
    values_HTh = values_KTh.repeat_interleave(group_size, dim=0)
    scores_HTT = queries_HTh @ keys_HTh.transpose(1, 2) * layer.impl.scale
    if layer.impl.logits_soft_cap:
        cap = layer.impl.logits_soft_cap
        scores_HTT = cap * torch.tanh(scores_HTT / cap)
    distance_TT = torch.arange(length)[:, None] - torch.arange(length)
    is_visible_TT = distance_TT >= 0
    if layer.sliding_window is not None:
        is_visible_TT &= distance_TT < layer.sliding_window
    weights_HTT = scores_HTT.masked_fill(~is_visible_TT, -torch.inf).softmax(dim=-1)
    return (weights_HTT @ values_HTh).transpose(0, 1).reshape(length, -1)


def engine_config(folder, **arguments):
    """vLLM's configuration of an exported folder, as `vllm serve FOLDER` makes it."""
    from vllm.engine.arg_utils import EngineArgs

    engine_arguments = EngineArgs(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        # vLLM's own operators in torch, in place of its compiled ones.
        compilation_config={"custom_ops": ["none"]},
        **arguments,
    )
    return engine_arguments.create_engine_config()


def load(config):
    """The model of a configuration, by vLLM's loader, within set_current_vllm_config."""
    from vllm.distributed import ensure_model_parallel_initialized
    from vllm.model_executor.model_loader import get_model_loader

    ensure_model_parallel_initialized(1, 1)
    loader = get_model_loader(config.load_config)
    return loader.load_model(vllm_config=config, model_config=config.model_config)


def logits_of(config, model, tokens):
    """[T, V] of one sequence."""
    from vllm.forward_context import set_forward_context

    with torch.inference_mode(), set_forward_context(None, config):
        ids = torch.from_numpy(tokens.astype(np.int64))
        hidden = model(input_ids=ids, positions=torch.arange(len(tokens)))
        return model.compute_logits(hidden).numpy()


def flat(kernel, inputs):
    """A kernel as torch.nn.Linear has it, [outputs, inputs]; `inputs` of its axes are summed."""
    return kernel.reshape(int(np.prod(kernel.shape[:inputs])), -1).T


def expected_parameters(params):
    """Our parameters under vLLM's names: q, k and v are one matrix, as are gate and up."""
    layers = jax.tree.map(np.asarray, params["layers"])
    is_sandwich = "post_mlp_layer_norm" in layers
    norms = {
        "pre_self_attention_layer_norm": "input_layernorm",
        "post_self_attention_layer_norm": "post_attention_layernorm",
        "pre_mlp_layer_norm": (
            "pre_feedforward_layernorm" if is_sandwich else "post_attention_layernorm"
        ),
        "post_mlp_layer_norm": "post_feedforward_layernorm",
    }
    result = {
        "model.embed_tokens.weight": params["token_embedder"]["embedding"],
        "model.norm.weight": params["decoder_norm"]["scale"],
    }
    if "logits_dense" in params:
        result["lm_head.weight"] = flat(params["logits_dense"]["kernel"], 1)
    for number in range(len(layers["mlp"]["wo"]["kernel"])):
        layer = jax.tree.map(lambda stacked, number=number: stacked[number], layers)
        attention, mlp = layer["self_attention"], layer["mlp"]
        inputs = [flat(attention[name]["kernel"], 1) for name in ("query", "key", "value")]
        gate_and_up = [flat(mlp[name]["kernel"], 1) for name in ("wi_0", "wi_1")]
        prefix = f"model.layers.{number}."
        result |= {
            f"{prefix}self_attn.qkv_proj.weight": np.concatenate(inputs),
            f"{prefix}self_attn.o_proj.weight": flat(attention["out"]["kernel"], 2),
            f"{prefix}mlp.gate_up_proj.weight": np.concatenate(gate_and_up),
            f"{prefix}mlp.down_proj.weight": flat(mlp["wo"]["kernel"], 1),
        }
        for ours, theirs in norms.items():
            if ours in layer:
                result[f"{prefix}{theirs}.weight"] = layer[ours]["scale"]
        for ours, theirs in {"query_norm": "q_norm", "key_norm": "k_norm"}.items():
            if ours in attention:
                result[f"{prefix}self_attn.{theirs}.weight"] = attention[ours]["scale"].reshape(-1)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("decoder_block", MODELS)
def test_an_export_is_loaded(engine, decoder_block, tmp_path):
    from vllm.config import set_current_vllm_config

    folder = tmp_path / "run"
    ours = write_random_run(folder, decoder_block, **MODELS[decoder_block])
    vocab_size = ours.model.shape.vocab_size
    run(f"from={folder}", f"to=hf:{tmp_path / 'exported'}")
    params = parameters_in_run(folder)
    config = engine_config(tmp_path / "exported")
    with set_current_vllm_config(config):
        model = load(config)
        expected = expected_parameters(params)
        loaded = dict(model.named_parameters())
        assert loaded.keys() == expected.keys()
        for name, parameter in loaded.items():
            array = parameter.detach().numpy()
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                array = array[:vocab_size]  # vLLM pads tables of the vocabulary
            np.testing.assert_array_equal(array, expected[name], err_msg=name)

        tokens = np.random.default_rng(1).integers(0, vocab_size, LENGTH).astype(np.int32)
        batch = Batch(tokens[None], tokens[None], np.ones((1, LENGTH), np.float32))
        decoder = abstract_model(ours.model)
        wanted = jax.jit(lambda params: decoder.merge(params)(batch))(params)[0]
        found = logits_of(config, model, tokens)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_families_agree(engine, case, tmp_path):
    """Every tensor has a place in the class of vLLM, and logits are those of the vectors."""
    from vllm.config import set_current_vllm_config

    golden = of_family_vectors(case)
    golden.store(tmp_path / "hf", golden.parameters)
    run(f"from=hf:{tmp_path / 'hf'}", f"to={tmp_path / 'run'}")
    run(f"from={tmp_path / 'run'}", f"to=hf:{tmp_path / 'exported'}")
    config = engine_config(tmp_path / "exported", skip_tokenizer_init=True)
    vocab_size = golden.logits.shape[-1]
    with set_current_vllm_config(config):
        model = load(config)
        for tokens, wanted in zip(golden.batch.tokens_BT, golden.logits, strict=True):
            found = logits_of(config, model, tokens)[:, :vocab_size]
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_architectures_are_registered():
    from vllm.model_executor.models import ModelRegistry

    supported = set(ModelRegistry.get_supported_archs())
    missing = {name for name, family in FAMILIES.items() if family.architecture not in supported}
    assert missing == NOT_IN_VLLM
