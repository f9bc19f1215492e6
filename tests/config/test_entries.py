"""Keys with entries, and program options, which are declared alike."""

import pytest

from MaxText.config.command_line import ProgramOptions, describe, read_options
from MaxText.config.keys import Count, key
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
        ("adafactor.momentum=1", "adafactor: momentum: 1.0 is not >= 0 and < 1"),
        ("adafactor={momentun: 0.1}", "no entry momentun; nearest: momentum"),
        ("adafactor=3", "is not {entry: value}"),
        ("growth.mode=zeros", "nearest:  zero"),
    ],
)
def test_mistakes(word, said):
    with pytest.raises(ConfigurationError) as caught:
        load([word])
    assert said in str(caught.value)


class Options(ProgramOptions):
    """Options of a test."""

    REQUIRED = ("from",)

    from_: str = key("", "Source.")
    number: Count = key(1, "How many.")
    fast: bool = key(False, "Whether it is fast.")


@pytest.mark.parametrize("words", ["number=3 --fast", "--number 3 fast=true", "--fast --number=3"])
def test_options_in_every_form(words):
    options, rest = read_options(Options, ["a.yml", "from=x", *words.split(), "steps=3"])
    assert options == Options(from_="x", number=3, fast=True)
    assert (rest.configuration, rest.problems) == (["a.yml", "steps=3"], [])
    assert "number=VALUE" in describe(Options)


def test_mistakes_in_options_are_found_at_once():
    _, rest = read_options(Options, ["numbr=3", "number=0", "--fats", "lerning_rate=1"])
    assert [problem.message.partition(":")[0] for problem in rest.problems] == [
        "numbr", "number", "fats", "from= is missing",
    ]  # fmt: skip
    assert rest.keys == ["lerning_rate=1"]
