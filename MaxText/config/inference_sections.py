"""Keys of text generation and evaluation."""

from typing import Literal

from MaxText.config.keys import (
    Count,
    CountOrAuto,
    Fraction,
    Natural,
    Options,
    OtherThan,
    Section,
    Share,
    key,
    options,
)

Strategy = Literal["composite", "greedy", "weighted", "nucleus", "topk"]
_STRATEGY = "decode_sampling_strategy"
_FILTERED = {"decode_sampling_temperature": OtherThan((0,))}
_TOP_K = _FILTERED | {_STRATEGY: ["composite", "topk"]}
_NUCLEUS = _FILTERED | {_STRATEGY: ["composite", "nucleus"]}
_COMPOSITE = _FILTERED | {_STRATEGY: ["composite"]}
_DRAWN = {_STRATEGY: ["composite", "weighted", "nucleus", "topk"]}


class FilterOptions(Options):
    """Further filters of the next token."""

    min_p: Share = key(0.0)
    """Keep tokens with at least this fraction of the highest probability; 0 disables."""
    typical_p: float = key(1.0, gt=0, le=1)
    """Keep the tokens of most typical surprisal whose probabilities sum to p; 1 disables."""
    eta: Fraction = key(0.0, "Keep tokens above min(eta, sqrt(eta) exp(-entropy)); 0 disables.")
    entmax_alpha: float = key(1.0, ge=1, le=2)
    """Use alpha-entmax instead of softmax; 1 is softmax, 2 is sparsemax."""


class DecodingConfig(Section):
    """Text generation by decode.py, and by train.py at its end."""

    prompt: str = key("I love to", "Text to continue.")
    prompt_file: str = key("")
    """Prompts instead of prompt: a text file with one per line, or .jsonl with the field prompt."""
    max_new_tokens: CountOrAuto = key(128, unit="tokens")
    """Maximum tokens to generate; -1 generates up to max_target_length, prompt included."""
    sample_tokens: Natural = key(0, "Tokens that train.py generates at the end; 0 disables.")
    decode_num_return_sequences: Count = key(1, "Completions per prompt.")
    decode_seed: int = key(0, "Sampling seed.", ge=0, le=2**32 - 1)
    decode_sampling_strategy: Strategy = key("composite")
    """composite samples with every setting below. greedy takes the most likely token; weighted,
    nucleus and topk use a single setting, as in MaxText."""
    decode_sampling_temperature: float = key(1.0, ge=0, le=1e6, only_if=_DRAWN)
    """Divisor of logits; 0 takes the most likely token."""
    decode_sampling_top_k: Natural = key(0, only_if=_TOP_K)
    """Keep the k most likely tokens; 0 disables."""
    decode_sampling_nucleus_p: float = key(1.0, gt=0, le=1, only_if=_NUCLEUS)
    """Keep the most likely tokens whose probabilities sum to p (top-p); 1 disables."""
    decode_filters: FilterOptions = options(FilterOptions, only_if=_COMPOSITE)
    repetition_penalty: float = key(1.0, gt=0, le=1e6)
    """Divide positive logits of tokens already in the text by this, and multiply negative ones."""
    decode_stop_strings: tuple[str, ...] = key((), "Stop strings; they are not part of the output.")
    decode_ignore_eos: bool = key(False, "Continue after the tokenizer's end-of-text token.")
    decode_stream: bool = key(True, "Stream the text of a single prompt.")
    decode_output_path: str = key("")
    """Output file for completions (JSON lines): text, tokens, log-probabilities. Empty: none."""
    autoregressive_decode_assert: str = key("")
    """Expected text; any other ends with exit code 1. For tests."""


class TaskFiles(Options):
    """Files of the tasks."""

    lambada: str = key("")
    """LAMBADA: JSON lines with the field text, or text with one passage per line."""
    wikitext: str = key("", "WikiText: wiki.test.raw, or JSON lines with the field page.")


class HarnessOptions(Options):
    """The lm-evaluation-harness; needs `pip install '.[lm-eval]'`."""

    tasks: tuple[str, ...] = key((), "Tasks to run.")
    task_path: str = key("", "Folder of additional task files (YAML).")
    num_fewshot: int = key(-1, "Few-shot examples per question; -1 is the task's default.", ge=-1)


class ScoringConfig(Section):
    """Evaluation by eval.py, in addition to the keys of evaluation."""

    eval_stride: CountOrAuto = key(-1, unit="tokens")
    """Targets per window that earlier windows have not scored; the rest is context. -1:
    non-overlapping windows, as in train.py."""
    eval_output: str = key("")
    """Output file for results (JSON). Empty: eval/<step>.json in the run, or the terminal only."""
    eval_tasks: tuple[Literal["lambada", "wikitext"], ...] = key(())
    """Tasks to score, read from task_files."""
    task_files: TaskFiles = options(TaskFiles)
    harness: HarnessOptions = key(HarnessOptions())
    """The lm-evaluation-harness; needs `pip install '.[lm-eval]'`."""
