"""The shipped MUDDFormers have as many parameters as their own programs give them."""

import pytest

from MaxText.configuration.loading import configure
from MaxText.layers.model import Model
from MaxText.training import backend_defaults

# Counted in the JAX program (the first two) and in the released weights. The stated numbers of all
# presets are checked by arithmetic in tests/configuration.
PARAMETERS = {
    "MUDDLlama2Medium": 414_095_429,
    "Llama2Medium": 411_616_256,
    "muddformer-2.8b": 2_804_871_709,
    "muddpythia-1.4b": 1_419_950_149,
    "muddpythia-2.8b": 2_784_962_589,
}
# Their sums alone.
CONNECTIONS = {
    "MUDDLlama2Medium": 2_355_269 + 25 * 1024 + 2 * 24 * 1024,  # and norms before, within and after
    "Llama2Medium": 0,
    "muddformer-2.8b": 8_775_709,
    "muddpythia-1.4b": 4_583_493,
    "muddpythia-2.8b": 8_775_709,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if "Medium" in n else [pytest.mark.slow]) for n in PARAMETERS],
)
def test_presets_have_the_published_number_of_parameters(name):
    section, _ = backend_defaults.resolve(configure(model_name=name).model, "gpu")
    model = Model(section)
    assert model.num_parameters == PARAMETERS[name]
    connections = (i.size for n, i in model.parameters.items() if n.startswith("connections/"))
    assert sum(connections) == CONNECTIONS[name]
