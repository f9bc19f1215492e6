"""Which sampling settings a strategy uses, wherever the others were set."""

import pytest

from MaxText.configuration.inference_sections import Decoding
from MaxText.generation.decoding import choice_of
from MaxText.generation.token_choice import Choice

EVERY = {"temperature": 0.7, "top_k": 40, "nucleus_p": 0.9, "min_p": 0.1, "typical_p": 0.8,
         "eta": 0.2, "entmax_alpha": 1.5}  # fmt: skip


def test_without_settings_all_ids_are_drawn():
    assert choice_of(Decoding()) == Choice()


@pytest.mark.parametrize(
    ("strategy", "used"),
    [
        ("weighted", ["temperature"]), ("topk", ["temperature", "top_k"]),
        ("nucleus", ["temperature", "nucleus_p"]), ("composite", EVERY), ("greedy", []),
    ],
)  # fmt: skip
def test_settings_of_other_strategies_have_no_effect(strategy, used):
    keys = {
        "decode_" + ("" if name == "entmax_alpha" else "sampling_") + name: value
        for name, value in EVERY.items()
    }
    section = Decoding(decode_sampling_strategy=strategy, repetition_penalty=1.2, **keys)
    expected = {name: EVERY[name] for name in used} or {"temperature": 0}
    assert choice_of(section) == Choice(repetition_penalty=1.2, **expected)
