"""The candidates of examples/arena: what they change, and what check_part.py says of the parts."""

import re
from collections import Counter

import jax
import pytest

from MaxText.config import registry
from MaxText.config.loading import load_config
from MaxText.config.schema import Config, all_keys, flatten
from MaxText.training.backend_defaults import abstract_model
from tests.house.sources import REPOSITORY, run_main

FOLDER = REPOSITORY / "examples" / "arena"
BASELINE = FOLDER / "baseline.yml"
CHEAT = FOLDER / "cheat_reads_the_future.py"
CONFIGS = sorted(set(FOLDER.glob("*.yml")) - {BASELINE})
PARTS = sorted(set(FOLDER.glob("*.py")) - {CHEAT})
CANDIDATES = [*CONFIGS, *PARTS]


def config_of(candidate) -> Config:
    """The baseline with a candidate in place: a file of keys, or a part under its name."""
    if candidate.suffix == ".yml":
        return load_config(candidate)
    load_config(BASELINE, import_modules=[str(candidate)])
    (part,) = registered(candidate)
    keys = {registry.KINDS[part.kind]: part.name}
    return load_config(BASELINE, import_modules=[str(candidate)], **keys)


def registered(path) -> list[registry.Registration]:
    """The parts that a file registers."""
    return [part for part in registry.registrations() if str(path) in part.location]


def num_parameters(config: Config) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model(config.model).abstract))


def test_twenty_candidates_have_the_promised_expectations():
    texts = [path.read_text(encoding="utf-8") for path in CANDIDATES]
    first_words = Counter(re.split(r'# |"""|:', text)[1] for text in texts)
    assert first_words == {"Good": 5, "Neutral": 10, "Bad": 5}
    assert all("We expect" in text for text in texts)
    assert len(PARTS) >= 6


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda path: path.name)
def test_a_candidate_changes_the_model_or_the_optimizer_alone(candidate):
    baseline = flatten(load_config(BASELINE))
    config = config_of(candidate)
    keys = all_keys()
    changed = {
        name
        for name, value in flatten(config).items()
        if value != baseline.get(name, keys[name].default) and name != "import_modules"
    }
    assert changed
    sections = {keys[name].section[0] for name in changed - {"learning_rate"}}
    assert sections <= {"model", "optimizer"}, changed
    assert num_parameters(config) == pytest.approx(num_parameters(load_config(BASELINE)), rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "failed"),
    [
        (FOLDER / "shifted_inputs.py", []),
        (FOLDER / "no_norm.py", []),
        (CHEAT, ["causality", "documents", "padding", "decode state"]),
    ],
    ids=["mixer", "norm", "cheat"],
)
def test_the_parts_conform_and_the_cheat_does_not(part, failed, capsys):
    code = run_main("check_part.py", [str(part)])
    printed = capsys.readouterr().out
    assert re.findall(r"^  ([\w ]+?) +FAILED", printed, re.MULTILINE) == failed, printed
    assert code == bool(failed)
