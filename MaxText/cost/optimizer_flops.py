"""FLOPs of optimizers that multiply matrices: Muon's orthogonalization, SOAP's eigenbases.

Legend: N matrices of a parameter (layers times experts), I inputs, O outputs. Only products of
matrices and factorizations are counted, 2 FLOPs per multiply-add, as for the model.
"""

import math
from collections.abc import Callable, Mapping

from MaxText.config.training_sections import OptimizerConfig
from MaxText.parallelism.logical_sharding import ParamSpec
from MaxText.parallelism.mesh import ShardingPlan
from MaxText.training.optimizers.matrices import MatrixShape, matrices_of
from MaxText.training.optimizers.muon import NUM_ITERATIONS
from MaxText.training.optimizers.soap import basis_size

# QR of n x n by Householder reflections with an explicit Q: 4/3 n^3 for R and as much for Q
# (Golub and Van Loan, Matrix Computations, 5.2).
_QR = 8 / 3


def optimizer_flops(
    config: OptimizerConfig, parameters: Mapping[str, ParamSpec]
) -> dict[str, float]:
    """Returns the FLOPs of one update of each parameter with matrices, by name.

    None for optimizers that are elementwise, and for those of users.

    Args:
      config: Of the optimizer.
      parameters: By name.
    """
    of_matrix = _RULES.get(config.opt_type)
    if of_matrix is None:
        return {}
    return {
        name: shape.num_matrices * of_matrix(config, shape)
        for name, shape in matrices_of(parameters).items()
    }


def optimizer_flops_per_device(
    config: OptimizerConfig, parameters: Mapping[str, ParamSpec], sharding: ShardingPlan
) -> float:
    """Returns the FLOPs of an update on one device.

    Devices share the work on a sharded parameter: each has whole matrices, or its part of the
    products (`on_whole_matrices`). Every replica repeats it.

    Args:
      config: Of the optimizer.
      parameters: By name.
      sharding: Of the parameters.
    """
    total = 0.0
    shardings = sharding.parameter_shardings(parameters)
    for name, flops in optimizer_flops(config, parameters).items():
        shard = math.prod(shardings[name].shard_shape(parameters[name].shape))
        total += flops * shard / parameters[name].size
    return total


def _newton_schulz(config: OptimizerConfig, shape: MatrixShape) -> float:
    """Returns the FLOPs of `newton_schulz` of one matrix.

    An iteration has the product of the matrix [n, m] with its transpose, of that [n, n] with
    itself, and with the matrix.
    """
    n, m = sorted((shape.inputs, shape.outputs))
    return NUM_ITERATIONS * (2 * n * n * m + 2 * n**3 + 2 * n * n * m)


def _soap(config: OptimizerConfig, shape: MatrixShape) -> float:
    """Returns the FLOPs of SOAP's update of one matrix, as a mean over steps.

    Each side with a basis has its statistics, and three rotations: of gradient, momentum and
    direction. Every `soap.frequency` steps it has a product of statistics and basis, and a QR.
    """
    flops = 0.0
    for n in (basis_size(shape.inputs, config), basis_size(shape.outputs, config)):
        flops += 4 * 2 * n * shape.inputs * shape.outputs
        flops += (2 + _QR) * n**3 / config.soap.frequency
    return flops


_RULES: Mapping[str, Callable[[OptimizerConfig, MatrixShape], float]] = {
    "muon": _newton_schulz,
    "muonh": _newton_schulz,
    "normuon": _newton_schulz,
    "soap": _soap,
}
