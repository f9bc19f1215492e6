"""Traced programs whose memory and work is known by hand."""

import jax
import jax.numpy as jnp
import pytest

from MaxText.cost.jaxpr_graph import tiled_size, traced
from MaxText.cost.step_memory import peak_memory
from MaxText.cost.step_time import list_ops
from MaxText.layers.attention.attention_core import SCORES_SCOPE

N = 16
SQUARE = 4 * N * N


def read(function, *shapes, weights=()):
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    closed = jax.make_jaxpr(function)(*given)
    return traced(closed.jaxpr, weights=weights)


def need(function, *shapes, kept=(None,), weights=()):
    return peak_memory(read(function, *shapes, weights=weights), kept)


def test_elementwise_work_takes_no_memory_of_its_own():
    found = need(lambda x, y: (jnp.tanh(x @ y) + 1.0) @ y, (N, N), (N, N))
    assert found.outside == 2 * SQUARE
    assert [array.writer for array in found.live] == ["dot_general"] * 2


def test_arrays_live_from_their_writer_to_their_last_reader():
    def chain(x):
        for _ in range(5):
            x = x @ x
        return x

    def twice(x, y):
        shared = jnp.tanh(x @ y)
        return (shared @ x) @ (shared @ y)

    assert need(chain, (N, N)).outside == 2 * SQUARE
    # tanh, which two products read, and both of its readers' results.
    assert need(twice, (N, N), (N, N)).outside == 3 * SQUARE


def product(x, dtype):
    return (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).astype(dtype)


def test_a_product_is_written_in_the_narrower_of_two_formats():
    def widened(x):
        return jnp.sin(product(x, jnp.float32)).sum()

    def narrowed(x):
        return (x @ x).astype(jnp.bfloat16).sum()

    def gathered(x):  # what is gathered is written in the format in which it is read
        logits = product(x, jnp.float32)
        return jnp.take_along_axis(logits, jnp.zeros((N, 1), int), axis=1).sum()

    assert need(widened, (N, N)).live[0].size == SQUARE / 2
    assert need(narrowed, (N, N)).live[0].size == SQUARE / 2
    assert need(gathered, (N, N)).live[0].size == SQUARE


def test_narrow_products_make_a_wide_fused_value_again():
    def twice(x, y):
        wide = jnp.tanh(x @ x)
        narrow = y.astype(jnp.bfloat16)
        return [
            jax.lax.dot(wide, other, preferred_element_type=jnp.float32)
            for other in (narrow, narrow.T)
        ]

    found = need(twice, (N, N), (N, N), kept=(None, None))
    assert [array.writer for array in found.live] == ["dot_general"] * 3


def test_what_a_device_keeps_of_a_result_is_less_once_it_is_written():
    def results(x):
        return x @ x, (2 * x) @ x

    assert need(results, (N, N), kept=(None, None)).outside == 2 * SQUARE
    assert need(results, (N, N), kept=(SQUARE / 4, None)).outside == 1.25 * SQUARE


def test_the_body_of_a_loop_works_while_the_loop_runs():
    def loop(x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x) @ x, x), x, None, length=3)

    found = need(loop, (N, N), kept=(None, None))
    # The last x and three stacked ones.
    assert found.outside == 4 * SQUARE
    assert found.in_loops == 2 * SQUARE


def test_the_peak_is_inside_of_a_loop_or_outside():
    def loop_and_more(x):
        x = jax.lax.scan(lambda x, _: (jnp.tanh(x @ x) @ x, None), x, None, length=3)[0]
        wide = jnp.concatenate([x] * 9)
        return wide @ wide.T

    found = need(loop_and_more, (N, N), kept=(None,))
    assert (found.outside, found.in_loops) == ((9 + 81) * SQUARE, 0)


def test_a_loop_of_one_iteration_is_none():
    def once(x):
        return jax.lax.scan(lambda carry, row: (carry @ row, carry), x, x[None])

    def chosen(x, index):
        return (jax.lax.dynamic_index_in_dim(x, index, keepdims=False) ** 2).sum()

    found = need(once, (N, N), kept=(None, None))
    assert (found.outside, found.in_loops) == (SQUARE, 0)
    # The gradient of one row, padded with zeros where it is read.
    closed = jax.make_jaxpr(lambda x, y: jax.grad(chosen)(x, 1) @ y)(*[jnp.ones((N, N))] * 2)
    names = [node.name for node in traced(closed.jaxpr).nodes if node.writes]
    assert names == ["dot_general"]


@pytest.mark.parametrize("is_table", [False, True])
def test_gradients_of_slices_under_vmap(is_table):
    """As in a pipeline; unlike rows of a token table."""

    def chosen(stack, indices):
        if is_table:
            return (jnp.take(stack[0, 0], indices, 0) ** 2).sum()
        return (jax.vmap(lambda slices, index: slices[index])(stack, indices) ** 2).sum()

    gradient = jax.make_jaxpr(lambda x, i: jax.grad(chosen)(x, i) + x)
    closed = gradient(jnp.ones((4, 8, N, N)), jnp.arange(4))
    names = [node.name for node in traced(closed.jaxpr).nodes if node.writes]
    assert any(name.startswith("scatter") for name in names) == is_table


def test_what_lives_from_the_first_loop_to_the_last():
    def loops(x):
        for _ in range(2):
            x = jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=3)[0]
        return x

    program = read(loops, (N, N))
    assert peak_memory(program, (None,), between=1e6).between == 1e6
    assert peak_memory(read(lambda x: x @ x, (N, N)), (None,), between=1e6).between == 0


def test_stacked_weights_that_a_loop_hands_on_are_no_copies():
    def loop(weights, x):
        def body(x, w):
            return x @ w[0], w[0]

        x, copies = jax.lax.scan(body, x, weights)
        return (x * copies.sum()).sum()

    assert need(loop, (3, 1, N, N), (N, N), weights=[1.0, 0.0]).outside < 2 * SQUARE


def test_work_counts_loops_as_often_as_they_run():
    def loop(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=7)[0]

    works = list_ops(read(loop, (N, N)))
    assert sum(work.times * work.operations for work in works) == 7 * 2 * N**3


@pytest.mark.parametrize("width", [8, 96])  # narrower and wider than the scores
def test_scores_of_attention_are_known_and_can_be_excluded(width):
    @jax.named_scope(SCORES_SCOPE)
    def attend(q, k, v):
        scores = jnp.einsum("bhtd,bhsd->bhts", q, k)
        return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores), v)

    def layers(q, k, v):
        return jax.lax.scan(lambda q, kv: (attend(q, *kv), None), q, (k, v))[0].sum()

    scores = 4 * 2 * 3 * 64 * 64
    program = read(attend, *[(2, 3, 64, width)] * 3)
    operations = sum(work.operations for work in list_ops(program))
    assert sum(work.num_bytes for work in list_ops(program)) > 2 * scores  # written once, read once
    program.drop_scores()
    assert sum(work.num_bytes for work in list_ops(program)) == 0
    assert sum(work.operations for work in list_ops(program)) == operations
    # Five layers save their outputs for the backward pass.
    shapes = (2, 3, 64, width), (5, 2, 3, 64, width), (5, 2, 3, 64, width)
    program = read(jax.grad(layers), *shapes)
    with_scores = peak_memory(program, (None,)).size
    program.drop_scores()
    without = peak_memory(program, (None,)).size
    assert without < scores * width / 8
    assert with_scores - without > 5 * scores


def test_products_of_tokens_outside_of_attention_are_no_scores():
    """Those of recurrent mixers within a chunk, which no kernel keeps on the chip."""
    program = read(lambda q, k: jnp.einsum("bhtd,bhsd->bhts", q, k), *[(2, 3, 64, 8)] * 2)
    program.drop_scores()
    assert peak_memory(program, (None,)).size == 4 * 2 * 3 * 64 * 64


@pytest.mark.parametrize(
    ("shape", "width", "size"),
    [
        ((8, 128), 4, 4096),
        ((50257, 192), 4, 50304 * 192 * 4),  # the long side lies along the lanes
        ((12, 192, 12, 64), 4, 12 * 256 * 12 * 64 * 4),
        ((100,), 4, 400),
        ((0, 5), 4, 0),
    ],
)
def test_arrays_on_a_tpu_lie_in_tiles(shape, width, size):
    assert tiled_size(shape, width) == pytest.approx(size)
