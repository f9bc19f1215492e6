"""Muon."""

import optax
import optax.contrib

from MaxText.config.registry import register
from MaxText.config.training_sections import OptimizerConfig
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.training.optimizers.parameter_trees import ParamSpecs, map_param_names


@register("optimizer", "muon")
def muon(config: OptimizerConfig, parameters: ParamSpecs) -> optax.GradientTransformation:
    """Muon for matrices, Adam for the rest (Jordan et al. 2024).

    The momentum of a matrix is orthogonalized by Newton-Schulz iterations and scaled to an RMS of
    about 0.2. `_muon_dimensions` chooses the matrices.
    """
    # A learning rate of -1 makes optax's complete optimizer return its direction unchanged.
    return optax.contrib.muon(
        learning_rate=-1.0,
        beta=config.muon_beta,
        eps=config.adam_eps,
        mu_dtype=config.mu_dtype or None,
        nesterov=config.nesterov,
        adam_b1=config.adam_b1,
        adam_b2=config.adam_b2,
        adam_eps_root=config.adam_eps_root,
        muon_weight_dimension_numbers=map_param_names(
            parameters, lambda name: _muon_dimensions(parameters[name])
        ),
        # Updates as large as Adam's, to share its learning rate (Liu et al. 2025, equation 4).
        consistent_rms=0.2,
    )


def _muon_dimensions(spec: ParamSpec) -> optax.contrib.MuonDimensionNumbers | None:
    """Returns the matrix dimensions; None leaves a parameter to Adam.

    Adam trains tables, norms, biases and the head (Jordan et al. 2024), and the second product of
    dense connections: in a 4-layer MUDDFormer, Muon there ended at a higher validation loss.
    """
    is_unsharded = not any(spec.logical_axes)
    if not spec.num_input_dims or "vocab" in spec.logical_axes or is_unsharded:
        return None
    # Stacked layers and experts are separate matrices.
    first = sum(name in ("layers", "exp") for name in spec.logical_axes)
    inputs = tuple(range(first, first + spec.num_input_dims))
    outputs = tuple(range(first + spec.num_input_dims, len(spec.shape)))
    return optax.contrib.MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)
