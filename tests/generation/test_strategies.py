"""Which sampling settings a strategy uses, wherever the others were set."""

import pytest

from MaxText.configuration.inference_sections import Decoding
from MaxText.generation.decoding import choice_of
from MaxText.generation.token_choice import Choice

EVERY = {
    "decode_sampling_temperature": 0.7,
    "decode_sampling_top_k": 40,
    "decode_sampling_nucleus_p": 0.9,
    "decode_sampling_min_p": 0.1,
    "decode_sampling_typical_p": 0.8,
    "decode_sampling_eta": 0.2,
    "decode_entmax_alpha": 1.5,
}


@pytest.mark.parametrize(
    ("strategy", "used"),
    [
        ("greedy", {"temperature": 0.0}),
        ("weighted", {"temperature": 0.7}),
        ("topk", {"temperature": 0.7, "top_k": 40}),
        ("nucleus", {"temperature": 0.7, "nucleus_p": 0.9}),
        (
            "composite",
            {
                "temperature": 0.7,
                "top_k": 40,
                "nucleus_p": 0.9,
                "min_p": 0.1,
                "typical_p": 0.8,
                "eta": 0.2,
                "entmax_alpha": 1.5,
            },
        ),
    ],
)
def test_settings_of_other_strategies_have_no_effect(strategy, used):
    section = Decoding(decode_sampling_strategy=strategy, repetition_penalty=1.2, **EVERY)
    assert choice_of(section) == Choice(repetition_penalty=1.2, **used)
