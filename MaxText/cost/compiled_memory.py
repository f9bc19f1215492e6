"""Device memory of a compiled step by cause, and advice if it is too much."""

import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from MaxText.cost.compiling import Planned
from MaxText.cost.hlo import LargeArray, Program
from MaxText.cost.targets import Target
from MaxText.errors import UserError
from MaxText.parallelism.mesh import HOST_MEMORY
from MaxText.runtime.compiled_steps import memory_of

_GIB = 2**30
_SHOWN = 8  # number of large arrays shown
_GPU_FRACTION = 0.75  # JAX's default for XLA_PYTHON_CLIENT_MEM_FRACTION


class Memory(NamedTuple):
    """Bytes on one device.

    Attributes:
      padding: Added to the arguments by the compiler's layouts.
      outputs: Outputs besides the donated state.
      gradients: All gradients at once, a part of the temporaries.
      temporaries: Everything that lives only within a step.
      code: Size of the program; 0 if unknown.
    """

    parameters: int
    optimizer: int
    batch: int
    padding: int
    outputs: int
    gradients: int
    temporaries: int
    code: int

    @property
    def given(self) -> int:
        return self.parameters + self.optimizer + self.batch + self.padding

    @property
    def total(self) -> int:
        return self.given + self.outputs + self.temporaries + self.code

    def rows(self) -> list[tuple[str, int]]:
        return [
            ("parameters", self.parameters),
            ("optimizer state and counters", self.optimizer),
            ("batch", self.batch),
            ("padding of these", self.padding),
            ("outputs besides the state", self.outputs),
            ("temporaries: gradients, activations", self.temporaries),
            ("program", self.code),
        ]


def bytes_on_device(tree: Any) -> int:
    """Returns bytes of sharded arrays or shapes on one device, without host memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != HOST_MEMORY
    )


def memory_by_cause(planned: Planned, compiled: jax.stages.Compiled) -> Memory:
    """Returns the memory of a compiled step on one device."""
    given = _given(planned)
    told = memory_of(compiled)
    analysis = compiled.memory_analysis()
    code = 0 if analysis is None else analysis.generated_code_size_in_bytes
    if not told:
        return given
    return given._replace(
        padding=max(told["arguments"] - given.given, 0),
        outputs=max(told["outputs"] - told["aliased"], 0),
        temporaries=told["temporaries"],
        code=code,
    )


def _given(planned: Planned) -> Memory:
    state = planned.state
    parameters = bytes_on_device(state.params)
    return Memory(
        parameters=parameters,
        optimizer=bytes_on_device(state) - parameters,
        batch=bytes_on_device(planned.batch),
        padding=0,
        outputs=0,
        gradients=parameters,  # same shapes and dtypes as the parameters
        temporaries=0,
        code=0,
    )


def usable(target: Target) -> int:
    """Returns the bytes of a device that a program can use; 0 if unknown."""
    if target.platform != "gpu":
        return target.memory
    fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    return int(target.memory * (float(fraction) if fraction else _GPU_FRACTION))


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a compiler error says that memory does not suffice."""
    return "RESOURCE_EXHAUSTED" in str(error)


def out_of_memory(target: Target, planned: Planned, error: BaseException) -> UserError:
    """Returns an error if compilation ran out of memory: TPU compilers know their target's size."""
    needs = str(error).splitlines()[0].partition("RESOURCE_EXHAUSTED: ")[2]
    arrays = arrays_as_written(planned.lowered)
    where = f"whole, over all {planned.layout.mesh.size} devices, before the compiler fuses any"
    return _too_much(target, planned, _given(planned), arrays, where, needs)


def check_fits(target: Target, planned: Planned, memory: Memory, program: Program) -> None:
    """Raises UserError if a compiled step needs more memory than the target has."""
    limit = usable(target)
    if limit and memory.total > limit:
        share = "" if target.platform == "tpu" else f" ({limit / target.memory:.0%} of its memory)"
        needs = (
            f"the step needs {memory.total / _GIB:.2f} GiB of the {limit / _GIB:.2f} GiB that a "
            f"program can have{share}"
        )
        arrays = program.largest_arrays(_SHOWN)
        where = "of one device, not all there at once"
        raise _too_much(target, planned, memory, arrays, where, needs)


def _too_much(
    target: Target,
    planned: Planned,
    memory: Memory,
    arrays: Sequence[LargeArray],
    where: str,
    needs: str,
) -> UserError:
    causes = [f"    {size / _GIB:9.2f} GiB  {cause}" for cause, size in memory.rows() if size]
    largest = [
        f"    {row.num_bytes / _GIB:9.2f} GiB  {row.shape}  {row.made_by}"
        + (f"  x {row.count}" if row.count > 1 else "")
        for row in arrays
    ]
    return UserError(
        f"{target.name} has too little memory: {needs}\n"
        "  On each device:\n"
        + "\n".join(causes)
        + f"\n    of the temporaries, all gradients at once are {memory.gradients / _GIB:.2f} GiB"
        + f"\n  The largest arrays ({where}):\n"
        + "\n".join(largest)
        + "\n  What to do, the cheapest first:\n"
        + "\n".join(f"    {line}" for line in _advice(target, planned, memory, arrays))
    )


def _advice(
    target: Target, planned: Planned, memory: Memory, arrays: Sequence[LargeArray]
) -> list[str]:
    section, batch, layout = planned.model.section, planned.config.batch, planned.layout
    lines = []
    limit = usable(target)
    if limit and memory.given + memory.gradients > limit:
        lines.append("the state and its gradients alone are too much: activations do not matter")
        if layout.mesh.shape["data"] > 1:
            lines.append("ici_data_parallelism=1 ici_fsdp_parallelism=-1: divide the weights")
    else:
        if section.memory.remat_policy != "full":
            lines.append("remat_policy=full: compute activations again (now "
                         f"{section.memory.remat_policy})")  # fmt: skip
        if not section.memory.scan_layers and section.scan_unsupported_reason is None:
            lines.append("scan_layers=true: one layer's temporaries at a time")
        vocabulary, length = section.shape.vocab_size, planned.length
        sizes = [list(map(int, re.findall(r"\d+", row.shape.partition("[")[2]))) for row in arrays]
        if any(vocabulary in of for of in sizes) and section.objective.num_vocab_tiling == 1:
            lines.append("num_vocab_tiling=8: logits in parts of the sequence")
        whole = section.attention.attention == "dot_product"
        if whole and any(of.count(length) >= 2 for of in sizes):
            lines.append("attention=autoselected: scores by a kernel, or in blocks")
        rows = batch.per_device_batch_size
        if rows * layout.mesh.size / 2 >= layout.num_batch_parts:
            lines.append(
                f"per_device_batch_size={rows / 2:g} "
                f"gradient_accumulation_steps={2 * batch.gradient_accumulation_steps}: the same "
                "update in more parts"
            )
    if not layout.optimizer_state_axis and layout.mesh.shape["data"] > 1:
        lines.append("shard_optimizer_over_data=true: each copy keeps a part of the moments")
    if planned.config.optimizer.opt_type == "adamw" and not planned.config.optimizer.mu_dtype:
        lines.append("mu_dtype=bfloat16: the first moment in half the bytes")
    lines.append(f"a machine with more devices or more memory than {target.name}")
    return lines


_RESULT = re.compile(r"^\s+%\S+ = \"?([\w.]+)\"?.*\bloc\((#loc\d*)\)$")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*)>")
_NAMED = re.compile(r'^(#loc\d*) = loc\("([^"]*)"(?:\((#loc\d*)\))?')
_LINE = re.compile(r'^(#loc\d*) = loc\("([^"]*)":(\d+)')
_BITS = re.compile(r"(\d+)$")


def arrays_as_written(lowered: jax.stages.Lowered, number: int = _SHOWN) -> list[LargeArray]:
    """Returns the largest arrays in a lowered, uncompiled program.

    Sizes are of whole arrays, over all devices.
    """
    text = lowered.as_text(debug_info=True)
    names: dict[str, str] = {}
    for line in text.splitlines():
        if match := _NAMED.match(line):
            names[match[1]] = match[2]
    found: dict[tuple[int, str, str], int] = {}
    for line in text.splitlines():
        match = _RESULT.match(line)
        if match is None or match[1].endswith((".while", ".constant", ".broadcast_in_dim")):
            continue
        results = line.rpartition(" loc(")[0]
        results = results.rpartition("->")[2] if "->" in results else results.rpartition(" : ")[2]
        made_by = names.get(match[2], match[1]).removeprefix("jit(train_step)/")
        for sizes, kind in _TENSOR.findall(results):
            bits = _BITS.search(kind)
            count = math.prod(int(size) for size in sizes.split("x") if size)
            size = count * (int(bits[1]) if bits else 8) // 8
            key = size, f"{kind}[{sizes.rstrip('x').replace('x', ',')}]", made_by
            found[key] = found.get(key, 0) + 1
    rows = [LargeArray(*key, count) for key, count in found.items()]
    return sorted(rows, key=lambda row: -row.num_bytes)[:number]
