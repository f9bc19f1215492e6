"""A model as the rest of the program sees it: an abstract parameter table and pure functions.

Modules declare the weights; from here on parameters are a plain nested dict of arrays, and the
module is merged inside the trace. Host dispatch is that of a dict.
"""

import jax
from flax import nnx

from MaxText.configuration.model_sections import Model as ModelSection
from MaxText.layers.decoder import Decoder
from MaxText.layers.stack import joined, keep_layers_apart
from MaxText.layers.weights import ParameterInfo

Parameters = dict  # nested, leaves are arrays


class Model:
    """The decoder of a configuration.

    Attributes:
      section: the model's configuration, with backend defaults resolved.
      parameters: name ("layers/mlp/wo/kernel") -> ParameterInfo, in the order of the tree.
      abstract: nested dict like the parameters, of jax.ShapeDtypeStruct.
    """

    def __init__(self, section: ModelSection):
        self.section = section
        module = nnx.eval_shape(lambda: Decoder(section, nnx.Rngs(params=0)))
        self._graphdef, state = nnx.split(module)
        self.abstract: Parameters = nnx.to_pure_dict(state)
        self.parameters: dict[str, ParameterInfo] = {}
        for path, parameter in nnx.to_flat_state(state):
            metadata = parameter.get_metadata()
            value = parameter.get_value()
            self.parameters["/".join(map(str, path))] = ParameterInfo(
                shape=value.shape,
                dtype=value.dtype,
                logical_axes=metadata["logical_axes"],
                num_in_dims=metadata["num_in_dims"],
            )

    @property
    def num_parameters(self) -> int:
        return sum(info.size for info in self.parameters.values())

    def initialize(self, key: jax.Array) -> Parameters:
        """Fresh parameters. Pure: call it under jit with output shardings."""
        return nnx.to_pure_dict(nnx.state(Decoder(self.section, nnx.Rngs(params=key))))

    def merge(self, parameters: Parameters) -> Decoder:
        """The module with these parameters, whole or in parts, for use inside a trace."""
        layers = parameters["layers"]
        if isinstance(layers, tuple):
            parameters = parameters | {"layers": joined(layers)}
        return nnx.merge(self._graphdef, parameters)


def in_parts(parameters: Parameters) -> Parameters:
    """Parameters whose layers are arrays of their own, for programs that generate text.

    The stacked arrays are given up one by one, so that there is never a second copy of all.
    """
    return parameters | {"layers": keep_layers_apart(parameters["layers"])}
