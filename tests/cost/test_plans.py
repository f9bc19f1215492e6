"""Hardware by its names, plans of small configurations, and plan.py as a user runs it."""

import dataclasses
import shlex
from typing import Any

import pytest

from MaxText.config.program_options import read_options
from MaxText.config.schema import flatten
from MaxText.cost import job_plan, plan_report
from MaxText.cost.abstract_step import make_program
from MaxText.cost.flops import count_flops
from MaxText.cost.job_plan import (
    JobPlan,
    command_with_plan,
    find_fitting_plans,
    make_plan,
    microbatches,
)
from MaxText.cost.plan_args import PlanOptions
from MaxText.cost.step_memory import estimate_memory
from MaxText.errors import UserError
from MaxText.hardware.chips import CHIPS, find_hardware
from MaxText.hardware.peak_flops import datasheet_peak
from tests.house.sources import run_main
from tests.small_models import tiny_config

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "capacity_factor": 2.0,
    "eval_capacity_factor": 2.0,
}


def plan_of(hardware: str, decoder_block: str = "llama2", **keys: Any) -> JobPlan:
    keys = {"per_device_batch_size": 2, "remat_policy": "full"} | keys
    place = find_hardware(hardware)
    return make_plan(tiny_config(decoder_block, **keys), place)


@pytest.mark.parametrize(
    ("block", "keys"),
    [
        ("llama2", {}),
        ("tokenformer", {"remat_policy": "none"}),
        pytest.param(
            "muddformer",
            {"scan_layers": False, "dense_aggregation_impl": "sum", "mlp_dim_multiple": 8},
            marks=pytest.mark.slow,
        ),
        ("gpt2", {"num_vocab_tiling": 4}),
    ],
)
def test_operations_are_those_of_the_formula(block, keys):
    plan = plan_of("1xH100", block, vocab_size=128, **keys)  # needs no padding there
    executed = count_flops(plan.program.model, plan.program.length).executed_per_token
    assert executed is not None
    # The formula skips products of anything but matrices with tokens.
    expected = executed * plan.program.tokens_per_device
    assert plan.time.operations == pytest.approx(expected, rel=0.02)


def test_parameters_and_state_are_exact():
    plan = plan_of("1xH100")
    held = 4 * plan.program.model.num_parameters
    assert plan.memory.parameters == plan.memory.gradients == held
    assert 2 * held < plan.memory.optimizer < 2 * held + 2000
    given = held + plan.memory.optimizer + plan.memory.batch
    assert plan.memory.total - plan.memory.temporaries == pytest.approx(given)
    split = plan_of("4xH100").memory.parameters
    assert held / 4 <= split < held / 3  # norms are replicated


def test_keeping_more_takes_more_memory_and_less_work():
    plans = [
        plan_of("1xH100", remat_policy=policy, base_num_decoder_layers=24)
        for policy in ("none", "minimal", "full")
    ]
    kept = [plan.memory.peak.outside for plan in plans]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]
    work = [plan.time.operations for plan in plans]
    assert work == sorted(work)
    assert work[0] < work[-1]


def test_microbatches_take_less_memory_and_a_sum_of_gradients():
    whole = plan_of("1xH100", per_device_batch_size=8)
    parts = plan_of("1xH100", per_device_batch_size=2, gradient_accumulation_steps=4)
    assert parts.program.tokens_per_update == whole.program.tokens_per_update
    assert parts.time.operations == whole.time.operations
    assert parts.memory.peak.size < whole.memory.peak.size
    assert parts.memory.gradients == 2 * whole.memory.gradients


def test_zero_1_splits_moments_alone():
    mesh: dict[str, Any] = {"ici_data_parallelism": 4, "ici_fsdp_parallelism": 1}
    copied = plan_of("4xH100", **mesh).memory
    split = plan_of("4xH100", shard_optimizer_over_data=True, **mesh).memory
    assert split.parameters == copied.parameters
    assert split.optimizer < copied.optimizer / 2


def test_weights_gathered_over_fsdp():
    plan = plan_of("4xH100", dtype="bfloat16")
    (found,) = plan.communication
    assert (found.axis, found.size) == ("fsdp", 4)
    # In the format of products: gathered twice, gradients scattered once; copied ones twice.
    whole = plan.program.model.num_parameters * 2 * 3 / 4
    assert 0.95 * 3 * whole < found.num_bytes <= 3 * whole


def test_tensor_parallelism_cuts_activations_and_exchanges_them():
    keys = {"base_num_kv_heads": 4, "per_device_batch_size": 1, "dtype": "bfloat16"}
    plan = plan_of("4xH100", ici_tensor_parallelism=2, **keys)
    assert [one.axis for one in plan.communication] == ["fsdp", "tensor"]
    assert plan.program.local_model.config.shape.dimensions.num_query_heads == 2
    assert plan.program.local_batch_size == 2
    state = plan.program.local_batch_size * plan.program.length * 32 * 2
    # 2 parts of 3 layers, forward and backward, the product of attention again, embedding and head.
    assert plan.communication[1].num_bytes == pytest.approx(2 * (2 * 2 * 3 + 3 + 2) * state / 2)


@pytest.mark.parametrize(
    ("keys", "local"),
    [
        (
            {"mixer": "mamba2", "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2},
            {"mamba_n_heads": 1, "mamba_n_groups": 1},
        ),
        (
            {"mixer": "gated_delta_net", "linear_num_key_heads": 2, "linear_num_value_heads": 4},
            {"linear_num_key_heads": 1, "linear_num_value_heads": 1},
        ),
        (
            {"base_num_query_heads": 4, "base_num_kv_heads": 2},
            {"base_num_query_heads": 1, "base_num_kv_heads": 1},
        ),
    ],
    ids=["groups of Mamba-2", "key heads of DeltaNet", "key heads of attention"],
)
def test_shared_heads_that_tensor_parallelism_does_not_divide(keys, local):
    mesh = {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 4, "sharding_tolerance": 1.0}
    local_config = plan_of("4xH100", **mesh, **keys).program.local_model.config
    assert local_config == local_config.with_values(local)


def test_a_second_fsdp_axis_splits_weights_and_no_products():
    keys: dict[str, Any] = {"ici_fsdp_parallelism": 2, "dtype": "bfloat16"}
    two, one = plan_of("4xH100", ici_fsdp_transpose_parallelism=2, **keys), plan_of("4xH100")
    assert two.time.operations == one.time.operations
    assert two.memory.parameters == pytest.approx(one.memory.parameters, rel=0.02)
    assert [found.axis for found in two.communication] == ["fsdp", "fsdp_transpose"]


@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
def test_parts_of_sequences(strategy):
    keys: dict[str, Any] = {"per_device_batch_size": 1, "dtype": "bfloat16"}
    keys |= {"attention": "blocked", "attention_block_size": 4}
    plan = plan_of(
        "4xH100",
        ici_fsdp_parallelism=1,
        ici_context_parallelism=4,
        context_parallel_strategy=strategy,
        **keys,
    )
    alone = plan_of("1xH100", **keys)
    assert plan.program.local_tokens == alone.program.local_tokens
    # Gathered keys are all multiplied, also those of later tokens.
    assert (plan.time.operations > 1.02 * alone.time.operations) == (strategy == "all_gather")
    assert plan.memory.parameters < alone.memory.parameters / 3
    (found,) = plan.communication
    assert (found.axis, found.size) == ("context", 4)
    weights = 3 * 2 * plan.program.model.num_parameters * 3 / 4
    shape = plan.program.config.model.shape.dimensions
    part = 2 * 2 * plan.program.local_tokens * shape.num_kv_heads * shape.head_dim
    times = {"all_gather": 3 * 3, "ring": 3 * 3 + 4 * 2}[strategy]
    assert found.num_bytes == pytest.approx(weights + 3 * times * part, rel=0.01)


def test_a_single_sequence_in_parts_is_computed_whole():
    keys: dict[str, Any] = {"ici_fsdp_parallelism": 1, "dtype": "bfloat16"}
    plan = plan_of(
        "4xH100",
        ici_context_parallelism=4,
        per_device_batch_size=0.25,
        context_parallel_strategy="ring",
        **keys,
    )
    whole = plan_of("1xH100", per_device_batch_size=1, **keys)
    assert 4 * plan.time.operations == pytest.approx(whole.time.operations, rel=0.02)


def test_experts_lie_on_their_own_devices():
    mesh: dict[str, Any] = {"ici_expert_parallelism": 4, "ici_fsdp_parallelism": 1}
    plan = plan_of("4xH100", sharding_tolerance=1.0, **EXPERTS, **mesh)
    assert [one.axis for one in plan.communication] == ["expert"]
    whole = plan_of("1xH100", **EXPERTS)
    assert plan.memory.parameters < whole.memory.parameters / 2


def test_a_slow_network_between_servers_counts():
    plan = plan_of("8xH100")
    assert [(near.axis, near.bandwidth) for near in plan.communication] == [("fsdp", 450e9)]
    # The interval holds its middle, and MFU falls with time.
    time = plan.time
    assert 0 < time.lower < time.estimate < time.upper
    assert 1 > time.mfu(time.lower) > time.mfu(time.upper)
    # Copies: each device sends its own part.
    copies, inside = plan_of("16xH100").communication
    assert (copies.axis, copies.size, copies.bandwidth) == ("data", 2, 50e9)
    assert (inside.axis, inside.size, inside.bandwidth) == ("fsdp", 8, 450e9)
    (split,) = plan_of("16xH100", dcn_data_parallelism=1, dcn_fsdp_parallelism=2).communication
    assert (split.size, split.bandwidth) == (16, 8 * 50e9)
    slices = plan_of("2xv5p-8").communication[0]
    assert (slices.axis, slices.bandwidth) == ("data", 6e9)


@pytest.mark.slow
def test_long_contexts_on_gpus_write_no_scores():
    keys: dict[str, Any] = {"dtype": "bfloat16", "max_target_length": 4096}
    fused, blocked = plan_of("1xH100", **keys), plan_of("1xH100", attention="blocked", **keys)
    assert "attention: flash (assumes that cuDNN has a kernel for it)" in fused.program.auto_choices
    assert fused.memory.peak.size < blocked.memory.peak.size / 4
    assert fused.time.estimate < blocked.time.estimate
    split = plan_of("4xH100", ici_fsdp_parallelism=1, ici_context_parallelism=4, **keys)
    assert split.program.assumes_cudnn
    assert not plan_of("1xH100", position_embedding="alibi", **keys).program.assumes_cudnn


def test_each_key_is_given_once_in_what_is_proposed():
    given = tiny_config(per_device_batch_size=2, remat_policy="none")
    plan = plan_of("1xH100", remat_policy="full", per_device_batch_size=2)
    proposed = command_with_plan(["a.yml", "remat_policy=none", "steps=3"], plan, given)
    assert proposed == ["a.yml", "steps=3", "remat_policy=full"]  # no quotes around a word


def test_rules_of_training_hold_for_what_is_proposed():
    # Samples are not drawn over stages; a rule that plan.py itself does not ask.
    place = dataclasses.replace(find_hardware("8xH100"), num_slices=2)
    for sample_tokens in (0, 4):
        config = tiny_config(
            base_num_decoder_layers=4,
            base_num_kv_heads=4,
            per_device_batch_size=2,
            sample_tokens=sample_tokens,
            prompt="a",
        )
        candidates = job_plan.candidate_meshes(config, place)
        meshes = job_plan._PlanSearch(flatten(config), place).meshes(config, candidates)
        stages = any(mesh.keys["dcn_pipeline_parallelism"] > 1 for mesh in meshes)
        assert stages == (sample_tokens == 0)


@pytest.mark.slow
def test_every_sequence_of_an_update_is_kept_by_what_fits(monkeypatch):
    monkeypatch.setattr("MaxText.cost.job_plan.POLICIES", ("minimal", "full"))
    place = find_hardware("2xH100")
    config = tiny_config(per_device_batch_size=2, base_num_decoder_layers=1)
    plans = find_fitting_plans(config, place)
    assert {plan.program.tokens_per_update for plan in plans} == {4 * 16}
    assert [plan.time.estimate for plan in plans] == sorted(plan.time.estimate for plan in plans)
    arguments = ["steps=10", "remat_policy=none", "prompt=a b\t  c\nd", f"dataset_path={'x' * 60}"]
    command = command_with_plan(arguments, plans[0], config)
    monkeypatch.setattr(type(plans[0].program.sharding), "mesh_sizes", "fsdp 2, " * 5)
    proposals = plan_report.format_proposals(plans, config, arguments, 1e6, 2.0)
    assert shlex.split(proposals.partition("data:\n")[2].replace("\\\n", ""))[2:] == command
    above = plan_report.describe(plans[0], 1e6, 2.0, with_notes=False)
    lines = [*above.splitlines(), "", *proposals.splitlines()]
    assert len(lines) <= 50  # a screen
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("sequences", "steps"), [(8, [1, 2, 4, 8]), (12, [1, 2, 4, 12]), (1, [1]), (5, [1, 5])]
)
def test_microbatches_end_with_single_sequences(sequences, steps):
    config = tiny_config(per_device_batch_size=sequences / 2)
    found = microbatches(config, find_hardware("2xH100"))
    assert [one["gradient_accumulation_steps"] for one in found] == steps
    assert found[-1]["per_device_batch_size"] == 0.5


def test_what_cannot_fit_is_said(monkeypatch):
    monkeypatch.setattr("MaxText.cost.job_plan.POLICIES", ("full",))
    place = find_hardware("2xH100")
    monkeypatch.setattr(type(place), "memory", 1000.0)
    config = tiny_config(per_device_batch_size=0.5, base_num_decoder_layers=1)
    with pytest.raises(UserError, match="2 x H100") as refused:
        find_fitting_plans(config, place)
    assert refused.value.exit_code == 1


@pytest.mark.parametrize("line", ["tokens=many", "tokens=0", "price_per_chip_hour=-1", ""])
def test_mistakes_on_the_command_line(line):
    with pytest.raises(UserError, match=line or "hardware= is missing"):
        read_options(PlanOptions, ["hardware=cpu", line] if line else []).check()


def test_the_program(capsys):
    def run(*arguments):
        code = run_main("plan.py", ["model_name=gpt2-124m", *arguments])
        return code, *capsys.readouterr()

    keys = ("per_device_batch_size=2", "base_num_decoder_layers=2", "max_target_length=64")
    code, output, _ = run("hardware=1xH200", *keys, "tokens=1B", "price_per_chip_hour=3")
    assert code == 0
    for shown in ("53,561,088 parameters", "optimizer state", "MFU", "cost", "1B tokens"):
        assert shown in output
    lines = output.splitlines()
    assert len(lines) <= 50  # a screen
    assert max(map(len, lines)) <= 100
    code, _, errors = run("hardware=9xY100")
    assert code == 2
    assert "9xY100" in errors


def test_a_letter_with_a_size_of_the_model():
    kinds = {"A": {"base_num_query_heads": 4, "base_mlp_dim": 64}, "B": {"base_mlp_dim": 32}}
    keys = {"layer_pattern": "AAB", "layer_kinds": kinds, "ici_tensor_parallelism": 2}
    model = make_program(tiny_config(**keys), find_hardware("cpu-8")).local_model.config
    sizes = [(x.dimensions.num_query_heads, x.dimensions.mlp_dim) for x in model.layers]
    assert sizes == [(2, 32), (2, 32), (2, 16)]


def test_experts_and_shared_experts_of_a_device():
    keys = {"num_experts": 4, "shared_experts": 2, "moe_mlp_dim": 24, "shared_expert_mlp_dim": 16}
    keys |= {"ici_tensor_parallelism": 2}
    model = make_program(tiny_config(**keys), find_hardware("cpu-8")).local_model.config
    experts = model.mixture_of_experts
    assert (experts.width(0), experts.shared_experts, experts.shared_width(0)) == (12, 2, 16)


def test_stages_of_a_pipeline():
    keys = {"base_num_decoder_layers": 8, "num_pipeline_repeats": 2, "num_pipeline_microbatches": 4}
    keys |= {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": -1}

    def made(**more):
        return make_program(tiny_config(**keys | more), find_hardware("cpu-8"))

    program = made()
    assert program.bubble == 1 / 9
    assert program.local_model.config.shape.dimensions.num_layers == 4
    memory = estimate_memory(program)
    offloaded = estimate_memory(made(optimizer_memory_host_offload=True))
    assert memory.fetched == 0
    assert offloaded.fetched + offloaded.optimizer == memory.optimizer
    assert offloaded.optimizer < 0.05 * memory.optimizer
    assert offloaded.total <= memory.total
    # A turn works on a microbatch.
    fewer = estimate_memory(made(num_pipeline_microbatches=2))
    assert memory.peak.in_loops < fewer.peak.in_loops


@pytest.mark.parametrize(
    ("name", "chip", "num_chips", "num_devices", "slices"),
    [
        ("v5p-128", "v5p", 64, 64, 1),
        ("2xv5p-128", "v5p", 128, 128, 2),
        ("v4-8", "v4", 4, 4, 1),
        ("v3-8", "v3", 4, 8, 1),
        ("v5litepod-256", "v5e", 256, 256, 1),
        ("tpu7x-16", "tpu7x", 8, 16, 1),
        ("1xh200", "H200", 1, 1, 1),
        ("16xA100-40", "A100-40", 16, 16, 2),
        ("a100-40", "A100", 40, 40, 5),
    ],
)
def test_names_of_hardware(name, chip, num_chips, num_devices, slices):
    found = find_hardware(name)
    assert found.chip is CHIPS[chip]
    sizes = (found.num_chips, found.num_devices, found.num_slices)
    assert sizes == (num_chips, num_devices, slices)


def test_the_cpu_is_one_device_with_the_memory_of_the_machine():
    found = find_hardware("cpu")
    assert (found.chip.platform, found.num_devices) == ("cpu", 1)
    assert found.memory > 2**28
    assert find_hardware("cpu-4").memory == found.memory / 4


@pytest.mark.parametrize("name", ["v5q-8", "H100", "0xH100", "v5p", "v5p-7", "v4-0", ""])
def test_other_names_are_refused_with_a_remedy(name, told):
    with pytest.raises(UserError) as caught:
        find_hardware(name)
    told(caught.value)


def test_every_chip_has_a_peak_and_a_share_of_it():
    for chip in CHIPS.values():
        assert datasheet_peak(chip.device_kind) is not None
        low, high = chip.efficiency
        assert 0 < low < high <= 1
