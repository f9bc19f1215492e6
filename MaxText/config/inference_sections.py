"""Keys about what is done with trained weights: generating text and scoring."""

from collections.abc import Iterable
from typing import Any, Literal

from MaxText.config.keys import Count, CountOrAuto, Fraction, Natural, Section, Share, key

_STRATEGY = "decode_sampling_strategy"
_DRAWN: dict[str, Iterable[Any]] = {_STRATEGY: ["composite", "weighted", "nucleus", "topk"]}


class Decoding(Section):
    """Text that decode.py generates, and train.py at its end."""

    prompt: str = key("I love to", "Text to continue.")
    prompt_file: str = key(
        "", "Prompts instead of prompt: a text file with one on each line, or .jsonl with the "
        "field prompt.",
    )  # fmt: skip
    max_new_tokens: CountOrAuto = key(
        128, "Tokens to generate at most; -1 goes on to max_target_length, prompt included.",
        unit="tokens",
    )  # fmt: skip
    sample_tokens: Natural = key(0, "Tokens that train.py generates at its end; 0 for none.")
    decode_num_samples: Count = key(1, "Completions of each prompt.")
    decode_seed: int = key(0, "Seed of all draws.", ge=0, le=2**32 - 1)
    decode_sampling_strategy: Literal["composite", "greedy", "weighted", "nucleus", "topk"] = key(
        "composite",
        "composite draws with every setting below. greedy takes the likeliest token; weighted, "
        "nucleus and topk draw with one setting only, as in MaxText.",
    )
    decode_sampling_temperature: float = key(
        1.0, "Divides the logits; 0 takes the likeliest token.", ge=0, le=1e6, only_if=_DRAWN
    )
    decode_sampling_top_k: Natural = key(
        0, "Keep the k likeliest tokens; 0 is off.", only_if={_STRATEGY: ["composite", "topk"]}
    )
    decode_sampling_nucleus_p: float = key(
        1.0, "Keep the likeliest tokens that together have this probability (top-p); 1 is off.",
        gt=0, le=1, only_if={_STRATEGY: ["composite", "nucleus"]},
    )  # fmt: skip
    decode_sampling_min_p: Share = key(
        0.0, "Keep tokens with at least this share of the likeliest one's probability; 0 is off.",
        only_if={_STRATEGY: ["composite"]},
    )  # fmt: skip
    decode_sampling_typical_p: float = key(
        1.0, "Keep the tokens of most typical surprisal that together have this probability; 1 is "
        "off.",
        gt=0, le=1, only_if={_STRATEGY: ["composite"]},
    )  # fmt: skip
    decode_sampling_eta: Fraction = key(
        0.0, "Keep tokens above min(eta, sqrt(eta) exp(-entropy)); 0 is off.",
        only_if={_STRATEGY: ["composite"]},
    )  # fmt: skip
    decode_entmax_alpha: float = key(
        1.0, "Probabilities by alpha-entmax instead of softmax, which 1 is; 2 is sparsemax.",
        ge=1, le=2, only_if={_STRATEGY: ["composite"]},
    )  # fmt: skip
    repetition_penalty: float = key(
        1.0, "Divides positive logits of tokens that the text has and multiplies negative ones.",
        gt=0, le=1e6,
    )  # fmt: skip
    decode_stop: tuple[str, ...] = key((), "Strings at which a text ends; they are left out.")
    decode_ignore_end: bool = key(False, "Go on after the tokenizer's end of text.")
    decode_stream: bool = key(True, "Print the text of a single prompt while it is generated.")
    decode_output: str = key(
        "", "File for the completions (JSON lines): text, tokens, log-probabilities. Empty: none."
    )
    autoregressive_decode_assert: str = key(
        "", "Text that must be generated; anything else ends in exit code 1. For tests."
    )


class Scoring(Section):
    """What eval.py measures on trained weights, besides the keys of evaluation."""

    eval_stride: CountOrAuto = key(
        -1,
        "Targets that a window adds to those before it; the rest of it is context. -1: windows "
        "side by side, as train.py evaluates.",
        unit="tokens",
    )
    eval_output: str = key(
        "", "File for the results (JSON). Empty: eval/<step>.json in the run, or the terminal only."
    )
    eval_tasks: tuple[Literal["lambada", "wikitext"], ...] = key(
        (), "Tasks to score, from the files that lambada_path and wikitext_path name."
    )
    lambada_path: str = key(
        "", "LAMBADA: JSON lines with the field text, or text with a passage on each line."
    )
    wikitext_path: str = key("", "WikiText: wiki.test.raw, or JSON lines with the field page.")
    harness_tasks: tuple[str, ...] = key(
        (), "Tasks of the lm-evaluation-harness to run; needs `pip install '.[lm-eval]'`."
    )
    harness_task_path: str = key("", "Folder of task files (YAML) besides the harness's own.")
    harness_num_fewshot: int = key(
        -1, "Examples before each question of the harness; -1 is what the task says.", ge=-1
    )
