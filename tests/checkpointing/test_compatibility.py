"""Which arrays of a checkpoint may take the place of which."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from MaxText.checkpointing.compatibility import (
    ConfigDiff,
    array_specs,
    check_compatible,
    format_mismatches,
    mismatches,
)
from MaxText.errors import UserError

FLOATS = ("float32", "bfloat16", "float16")
DTYPES = (*FLOATS, "int32", "uint32", "int8", "bool")


def specs(**leaves):
    """Specs of arrays given as (shape, dtype)."""
    return array_specs({name: jax.ShapeDtypeStruct(*leaf) for name, leaf in leaves.items()})


@pytest.mark.parametrize(("stored", "wanted"), [*itertools.product(DTYPES, repeat=2)])
def test_floats_are_cast_and_nothing_else(stored, wanted):
    problems = mismatches(specs(x=((2, 3), stored)), specs(x=((2, 3), wanted)))
    fits = stored == wanted or {stored, wanted} <= {*FLOATS}
    assert bool(problems) == (not fits)
    if not fits:
        (line,) = problems
        assert line.split()[:2] == ["other", "kind"]
        assert f"stored {stored}[2,3], wanted {wanted}[2,3]" in line


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 1), (6,), (2, 4), ()])
def test_shapes_are_equal(shape):
    (line,) = mismatches(specs(x=(shape, "float32")), specs(x=((2, 3), "float32")))
    assert line.split()[:2] == ["other", "shape"]


def test_names_are_equal():
    stored = specs(a=((2,), "float32"), b=((2,), "float32"))
    wanted = specs(b=((2,), "float32"), c=((2,), "float32"))
    assert sorted(line.split()[0] + line.split()[1] for line in mismatches(stored, wanted)) == [
        "extraa:",
        "missingc:",
    ]


def test_the_casts_of_a_state_are_named_by_path():
    stored = {"params": {"wi": jnp.ones(3), "wo": jnp.ones(2)}, "step": jnp.int32(3)}
    wanted = {"params": {"wi": jnp.ones(3, jnp.bfloat16), "wo": jnp.ones(2)}, "step": jnp.int32(0)}
    none = ConfigDiff(None, {})
    casts = check_compatible(stored, wanted, none)
    assert {path: (old.name, new.name) for path, (old, new) in casts.items()} == {
        "params/wi": ("float32", "bfloat16")
    }
    with pytest.raises(UserError, match=r"other kind  step: stored int32\[\], wanted uint32\[\]"):
        check_compatible(stored, wanted | {"step": jnp.uint32(0)}, none)


def message_of(stored, current, *, is_same_run=False, max_lines=None):
    diff = ConfigDiff(stored=stored, current=current, is_same_run=is_same_run)
    problems = ["missing     a: none", "extra       b: stored c"]
    return format_mismatches(problems, diff, max_lines).splitlines()


@pytest.mark.parametrize(
    ("is_same_run", "remedy"), [(True, "start another run_name"), (False, "load other weights")]
)
def test_a_mismatch_names_the_keys_that_shape_the_model(is_same_run, remedy):
    stored = {"base_emb_dim": 8, "steps": 10}
    current = {"base_emb_dim": 4, "steps": 20}
    lines = message_of(stored, current, is_same_run=is_same_run, max_lines=1)
    assert lines[1:] == [
        "  missing     a: none",
        "  ... and 1 more",
        "Keys of the model or the optimizer that differ (checkpoint -> now):",
        "  base_emb_dim: 8 -> 4",
        f"Set them back, or {remedy}.",
    ]


def test_a_mismatch_that_no_key_explains():
    values = {"base_emb_dim": 8}
    assert message_of(values, values | {"steps": 9})[-1].endswith("so the program itself changed.")
    assert message_of(None, values)[-1] == "  The checkpoint does not record its configuration."


@pytest.mark.parametrize("stored", [{}, {"parametrization": "mup", "base_shape": {"head_dim": 4}}])
def test_weights_of_another_parametrization_are_refused(stored):
    """Their shapes fit, and they mean something else. Older checkpoints lack the keys."""
    tree = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    current = {"parametrization": "mup", "base_shape": {"head_dim": 8}}
    assert check_compatible(tree, tree, ConfigDiff(stored, stored)) == {}
    message = "base_shape {head_dim: 4} -> " if stored else "parametrization standard -> mup"
    with pytest.raises(UserError, match=re.escape(message)):
        check_compatible(tree, tree, ConfigDiff(stored, current))
