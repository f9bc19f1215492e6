"""What is read off a compiled program's text: loops, collectives, large arrays."""

import jax
import jax.numpy as jnp

from MaxText.compilation.ahead_of_time import _program
from MaxText.compilation.hlo import Collective, HloModule, LargeBuffer

# In the form of a TPU's: no trip counts, tilings, a sum of which each device keeps a part.
TEXT = """HloModule jit_train_step, is_scheduled=true

FileNames
1 "/home/me/MaxText/layers/dense.py"
2 "/lib/site-packages/optax/update.py"

FunctionNames
1 "Dense.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=44 end_line=44 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

%body (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[]{:T(128)}, f32[64]{0}) parameter(0)
  %all-gather.1 = bf16[256,64]{1,0:T(8,128)(2,1)} all-gather(%x), channel_id=1, dimensions={0}
  %in_vmem = f32[4096]{0:T(1024)S(1)} fusion(%all-gather.1), kind=kLoop, calls=%fused
  %big = f32[1024,4]{1,0} fusion(%all-gather.1), kind=kLoop, calls=%fused, METADATA
  ROOT %t = (s32[]{:T(128)}, f32[64]{0}) tuple(%p)
}

%fused (q: f32[8]) -> f32[9999] {
  ROOT %only_within = f32[9999]{0} broadcast(%q), dimensions={}
}

%condition (p.1: (s32[], f32[64])) -> pred[] {
  %bound = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[]{:T(512)} compare(%g, %bound), direction=LT
}

%all-reduce-scatter.2 (i: bf16[32,8]) -> bf16[8,8] {
  %all-reduce.9 = bf16[32,8]{1,0} all-reduce(%i), channel_id=3, to_apply=%add
  ROOT %part = bf16[8,8]{1,0} dynamic-slice(%all-reduce.9, %o), dynamic_slice_sizes={8,8}
}

ENTRY %main (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  %while.1 = (s32[]{:T(128)}, f32[64]{0}) while(%t0), condition=%condition, body=%body
  %scatter = bf16[8,8]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.2
  %start = (f32[10]{0}, f32[40]{0}) all-gather-start(%a), channel_id=4, dimensions={0}
  %done = f32[40]{0} all-gather-done(%start)
  ROOT %out = f32[64]{0} get-tuple-element(%while.1), index=1
}
""".replace("METADATA", 'metadata={op_name="jit(train_step)/jvp()/dot_general" stack_frame_id=2}')


def test_operations_in_a_loop_count_as_often_as_it_runs():
    program = HloModule(TEXT)
    assert program.num_loops == 1
    assert not program.has_unknown_loops
    assert program.collectives() == [
        Collective("all-gather", 3 + 1, 3 * 256 * 64 * 2 + 40 * 4),
        Collective("reduce-scatter", 1, 32 * 8 * 2),
    ]
    # The count that a compiler notes wins, and an unknown one is said to be so.
    noted = TEXT.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert HloModule(noted).collectives()[0].count == 5 + 1
    # Products in windows take two windows at a time.
    by_two = TEXT.replace("tuple(%p)", "tuple(%next, %p)\n").replace(
        "  ROOT %t =", "  %two = u32[] constant(2)\n  %next = u32[] add(%n, %two)\n  ROOT %t ="
    )
    counter = "%g = u32[] get-tuple-element(%p.1), index=0\n  ROOT %lt"
    by_two = HloModule(by_two.replace("ROOT %lt", counter).replace("s32[]", "u32[]"))
    assert by_two.collectives()[0].count == 2 + 1
    bound = "%bound = s32[]{:T(128)} constant(3)"
    unknown = HloModule(TEXT.replace(bound, "%bound = s32[] copy(%n)"))
    assert unknown.has_unknown_loops
    assert unknown.collectives()[0].count == 1 + 1


def test_a_collective_in_several_computations_counts_once():
    again = "  %again = bf16[256,64]{1,0} all-gather(%q), channel_id=1, dimensions={0}\n"
    overlapped = TEXT.replace("  ROOT %only_within", again + "  ROOT %only_within")
    assert HloModule(overlapped).collectives() == HloModule(TEXT).collectives()
    in_shard_map = TEXT.replace("channel_id=4", "channel_id=1")
    assert HloModule(in_shard_map).collectives() == HloModule(TEXT).collectives()


def test_large_arrays_lie_in_the_main_memory_and_not_within_fusions():
    largest = HloModule(TEXT).largest_arrays(2)
    source = "jvp()/dot_general (MaxText/layers/dense.py:44)"
    assert largest == [
        LargeBuffer(256 * 64 * 2, "bf16[256,64]", "all-gather", 1),
        LargeBuffer(1024 * 4 * 4, "f32[1024,4]", source, 1),
    ]


def test_text_that_is_not_understood_gives_nothing():
    assert HloModule("").collectives() == []
    assert HloModule("something else\n{").largest_arrays(3) == []


def test_a_program_of_this_jax():
    def step(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=7)[0]

    scanned = HloModule(jax.jit(step).lower(jnp.ones((24, 24))).compile().as_text())
    assert scanned.num_loops == 1
    assert not scanned.has_unknown_loops
    assert "f32[24,24]" in {row.shape for row in scanned.largest_arrays(3)}
    assert scanned.collectives() == []


def test_a_program_that_the_compiler_cannot_write_down():
    class Compiled:
        def as_text(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure\nand a long trace")

    shown = []
    assert not _program(Compiled(), shown.append).collectives()
    assert shown[0].endswith("not listed: INTERNAL: RET_CHECK failure")
