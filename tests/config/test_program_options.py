"""Options of programs besides the keys of a configuration."""

import dataclasses
from typing import Literal

import pytest

from MaxText.config.keys import Count, NonNegative
from MaxText.config.problems import ConfigurationError
from MaxText.config.program_options import describe, option, read_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a test."""

    from_: str = option("", "Source.", required=True)
    number: Count = option(1, "How many.", metavar="NUMBER")
    rate: NonNegative | None = option(None, "How much.")
    size: Literal["whole", "half"] = option("whole", "Of what.")
    fast: bool = option(False, "Whether it is fast.")
    kind: str = option("", "100 % of one kind.", choices=("fine", "coarse"))
    extra_flag: tuple[str, ...] = option((), "More of them.", repeated=True)


@pytest.mark.parametrize(
    ("typed", "value"),
    [("number=1e3", 1000), ("number=1_000", 1000), ("rate=none", None), ("rate=0.5", 0.5)],
)
def test_options_are_read_as_keys(typed, value):
    parsed = read_options(Options, ["from=x", typed])
    assert getattr(parsed.options, typed.partition("=")[0]) == value


@pytest.mark.parametrize(
    ("typed", "message", "accepted"),
    [
        ("number=1.5", "number: '1.5' is not an integer", "an integer, >= 1"),
        ("number=9e99", "number: '9e99' is beyond integers of 64 bits", "an integer, >= 1"),
        ("rate=-1", "rate: -1.0 is not >= 0", "a number or null, >= 0"),
        ("size=large", "size: 'large' is not among the choices", "one of whole, half"),
        ("from=none", "from= is missing", "Source."),
    ],
)
def test_wrong_values_of_options(typed, message, accepted):
    (problem,) = read_options(Options, ["from=x", typed]).problems
    assert problem.message == message
    assert ("accepted", accepted) in problem.context


@pytest.mark.parametrize(
    "line",
    ["number=3 --fast", "--number 3 fast=true", "--fast --number=3", "--no-fast --fast number=3"],
)
def test_options_in_every_form(line):
    parsed = read_options(Options, ["a.yml", "from=x", *line.split(), "steps=3"])
    assert parsed.options == Options(from_="x", number=3, fast=True)
    assert (parsed.configuration, parsed.problems) == (["a.yml", "steps=3"], [])
    assert set(parsed.given) == {"from", "number", "fast"}


def test_a_repeated_option_collects_its_values():
    line = ["--extra-flag=--a=b", "extra_flag=c", "--extra_flag", "d", "from=x"]
    assert read_options(Options, line).options.extra_flag == ("--a=b", "c", "d")


def test_what_belongs_to_the_configuration_is_left_in_order():
    line = ["from=x", "--learning_rate", "1e-3", "-v", "--steps=-1", "number=2", "a=b"]
    parsed = read_options(Options, line)
    assert parsed.settings == ["learning_rate=1e-3", "steps=-1", "a=b"]
    assert parsed.operands == ["-v"]


def test_the_last_of_two_values_wins(capsys):
    assert read_options(Options, ["from=x", "number=2", "number=4"]).options.number == 4
    assert capsys.readouterr().err == "note: number is given twice: number=4 wins\n"


def test_mistakes_in_options_are_found_at_once():
    line = ["numbr=3", "number=0", "--fats", "lerning_rate=1", "kind=corse"]
    parsed = read_options(Options, line)
    messages = [problem.message for problem in parsed.problems]
    assert messages == [
        "number: 0 is not >= 1",
        "kind: 'corse' is not among the choices",
        "numbr: neither an option of this program nor a key",
        "fats: neither an option of this program nor a key",
        "from= is missing",
    ]
    assert ("nearest", "coarse") in parsed.problems[1].context
    assert parsed.options == Options()
    assert parsed.settings == ["lerning_rate=1"]


def test_an_option_without_its_value():
    with pytest.raises(ConfigurationError, match="--number: expected one argument"):
        read_options(Options, ["from=x", "--number"])


def test_options_are_described():
    text = describe(Options)
    assert text.startswith("Options of a test.\n\n  from=VALUE")
    for line in ("number=NUMBER", "--fast ", "kind=fine|coarse", "100 % of one kind."):
        assert line in text
    assert "--no-fast" not in text
