"""Rematerialization: which values of a layer the backward pass reads from memory.

A policy is a list of names that `capture.tag` gives to values of a layer. The backward pass reads
those, and computes all others again from the layer's inputs.
"""

from collections.abc import Callable

import jax

from MaxText.config.model_sections import RematPolicy

_PROJECTIONS = ("query_proj", "key_proj", "value_proj", "attention_gate")
_PRODUCTS_OF_ATTENTION = (*_PROJECTIONS, "slot_scores", "out_proj")
SAVED_NAMES: dict[str, tuple[str, ...]] = {  # policy -> names of saved, or offloaded, values
    "full": (),
    "minimal": (*_PRODUCTS_OF_ATTENTION, "mlpwi", "mlpwo"),
    "minimal_with_context": (*_PRODUCTS_OF_ATTENTION, "context", "mlpwi", "mlpwo"),
    "save_dot_except_mlp": _PRODUCTS_OF_ATTENTION,
    "save_dot_except_mlpwi": (*_PRODUCTS_OF_ATTENTION, "mlpwo"),
    "save_qkv_proj": _PROJECTIONS,
    "save_out_proj": ("out_proj",),
    "minimal_offloaded": (*_PRODUCTS_OF_ATTENTION, "mlpwi", "mlpwo"),
    "qkv_proj_offloaded": _PROJECTIONS,
}
_ALWAYS_SAVED = ("depth_product", "depth_aggregate")  # of dense connections, costly to recompute


def apply_remat(function: Callable, policy: RematPolicy, *, in_scan: bool) -> Callable:
    """Returns `function` with a backward pass that recomputes what `policy` does not save.

    Args:
      function: A layer, or another pure function of arrays.
      policy: A key of SAVED_NAMES; "none" returns the function as it is. Policies that end with
        "_offloaded" save their values in host memory.
      in_scan: Whether the function is the body of a loop. The loop itself then keeps XLA from
        merging the recomputation with the forward pass; elsewhere jax.checkpoint has to.
    """
    if policy == "none":
        return function
    if policy.endswith("_offloaded"):
        saved = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(_ALWAYS_SAVED),
            names_which_can_be_offloaded=list(SAVED_NAMES[policy]),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        saved = jax.checkpoint_policies.save_only_these_names(*_ALWAYS_SAVED, *SAVED_NAMES[policy])
    return jax.checkpoint(function, policy=saved, prevent_cse=not in_scan)
