"""Keys with entries."""

import pytest

from MaxText.config.loading import load
from MaxText.config.problems import ConfigurationError


def test_entries_of_stronger_layers_replace_only_themselves(write, monkeypatch):
    path = write("opt_type: adafactor\nadafactor: {momentum: 0.1, decay_exponent: 0.5}\n")
    monkeypatch.setenv("M_ADAFACTOR", "{decay_exponent: 0.6}")
    arguments = [path, "adafactor.momentum=0.2", "adafactor.clipping_threshold=3"]
    found = load(arguments).config.optimizer.adafactor
    assert (found.momentum, found.decay_exponent, found.clipping_threshold) == (0.2, 0.6, 3)
    assert found.min_dim_size_to_factor == 128


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("adafactor.momentum=1", "adafactor: momentum: 1.0 is not < 1"),
        ("adafactor={momentun: 0.1}", "no entry momentun; nearest: momentum"),
        ("adafactor=3", "is not {entry: value}"),
        ("growth.mode=zeros", "nearest:  zero"),
    ],
)
def test_mistakes(word, said):
    with pytest.raises(ConfigurationError) as caught:
        load([word])
    assert said in str(caught.value)
