"""The "maxtext" model of lm-evaluation-harness (EleutherAI).

Results agree with the harness's "hf" model for the same weights in transformers.
"""

import functools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tokenizers

from MaxText.errors import UserError
from MaxText.evaluation.scorer_inputs import Continuation, rolling_windows
from MaxText.evaluation.tasks import log_progress
from MaxText.inference import checkpoint_config
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.inference.trained_model import Log, TrainedModel, load_model
from MaxText.input_pipeline.tokenization.hugging_face import HuggingFaceTokenizer
from MaxText.input_pipeline.tokenization.interface import without_surrogates
from MaxText.runtime import start_up

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
except ImportError as error:
    raise UserError(
        f"lm-evaluation-harness is not installed ({error}): pip install '.[lm-eval]'."
    ) from error

if TYPE_CHECKING:
    from MaxText.inference.engine import Engine
    from MaxText.inference.sampling import SamplingParams

# generation_kwargs -> field of inference.sampling.SamplingParams
_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "nucleus_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
}
_NEXT_ARGUMENT = re.compile(r",(?=\s*[A-Za-z_]\w*=)")


@register_model("maxtext")
class MaxTextLM(TemplateLM):
    """A harness model of trained weights on the devices of this process.

        lm = MaxTextLM.open("load_parameters_path=maxtext_output/quickstart")
        lm_eval.simple_evaluate(model=lm, tasks=["lambada_openai"])

    `was_asked` tells whether a request came; errors before that are not caused by the model.
    """

    def __init__(self, trained: TrainedModel, tokenizer: ModelTokenizer, log: Log = print):
        """Takes the results of load_model and open_tokenizer.

        Raises UserError if the model or tokenizer cannot score text.
        """
        from MaxText.evaluation.scorers import Scorer

        super().__init__()
        self._trained, self._log = trained, log
        self._scorer = Scorer(trained)
        self._text_tokenizer = _HarnessTokenizer(tokenizer)
        self._prefix = tokenizer.prefix
        self._eos_ids = frozenset(tokenizer.eos_ids)
        self._prefix_id = tokenizer.prefix_token_id()
        eos = tokenizer.tokenizer.entry.eos_id
        self._eot_id = eos if eos is not None else next(iter(tokenizer.eos_ids), self._prefix_id)
        self._num_ids = tokenizer.tokenizer.entry.vocab_size
        self.was_asked = False

    @classmethod
    def open(cls, arguments: str | Sequence[str], log: Log = print) -> "MaxTextLM":
        """Opens weights from a command line, given as one string or several.

        It must include load_parameters_path=RUN. Raises UserError for bad arguments or weights.
        """
        words = shlex.split(arguments) if isinstance(arguments, str) else list(arguments)
        loaded = checkpoint_config.load(words)
        start_up.choose_platform(loaded.config.run.hardware)
        trained = load_model(loaded.config, log)
        return cls(trained, trained.open_tokenizer(typed=loaded.typed("tokenizer_path")), log)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> "MaxTextLM":
        """Opens weights from the harness's model_args string, key=value,key=value."""
        words = [word.strip() for word in _NEXT_ARGUMENT.split(arg_string) if word.strip()]
        return cls.open(words)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "MaxTextLM":
        """Opens weights from the harness's model_args dict."""
        return cls.open([f"{name}={value}" for name, value in arg_dict.items()])

    @property
    def eot_token_id(self) -> int:
        """End-of-text id."""
        return self._eot_id

    @property
    def prefix_token_id(self) -> int:
        """Id before a text without context: beginning of text, else end of text."""
        return self._prefix_id

    @property
    def max_length(self) -> int:
        return self._scorer.window

    @property
    def max_gen_toks(self) -> int:
        """Default number of new tokens, as in the harness's own models."""
        return 256

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns ids, adding the prefix unless the text starts with it.

        Control tokens spelled out in the text become their ids, as in transformers.
        """
        ids = self._text_tokenizer.encode(string)
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(
                self._text_tokenizer.decode_all([self._prefix_id])
            )
        return [*self._prefix, *ids] if add_special_tokens else ids

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        self.was_asked = True
        asked = []
        for texts, context, ids in requests:
            if not 0 < len(ids) <= self.max_length:
                raise UserError(
                    f"the answer {texts[1][:60]!r} has {len(ids)} tokens; it must have between 1 "
                    f"and max_target_length={self.max_length}."
                )
            asked.append(Continuation(context or [self._prefix_id], ids))
        progress = None if disable_tqdm else log_progress("loglikelihood", self._log)
        scores = self._scorer.score_continuations(asked, progress)
        answers = [(score.log_probability, score.is_greedy) for score in scores]
        for (texts, *_), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the total log-probability of each text, over disjoint windows."""
        self.was_asked = True
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            of_text = rolling_windows(ids, self._prefix_id, self.max_length)
            windows += of_text
            owners += [number] * len(of_text)
        progress = None if disable_tqdm else log_progress("loglikelihood_rolling", self._log)
        totals = [0.0] * len(requests)
        scores = self._scorer.score_continuations(windows, progress)
        for owner, score in zip(owners, scores, strict=True):
            totals[owner] += score.log_probability
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns continuations up to the first stop string of the task.

        Holds the weights on device twice meanwhile, because generation uses unstacked parameters.
        """
        import jax
        import jax.numpy as jnp

        from MaxText.inference.engine import Engine

        self.was_asked = True
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(number)
        progress = None if disable_tqdm else log_progress("generate_until", self._log)
        texts = [""] * len(requests)
        num_done = 0
        trained = self._trained
        # Copied because `unstack_params` donates its argument, and scoring still needs the weights.
        parts = trained.model.unstack_params(jax.tree.map(jnp.copy, trained.params))

        @functools.cache
        def engine_for(sampling: "SamplingParams") -> Engine:
            return Engine(trained.model, parts, trained.sharding, sampling, num_ids=self._num_ids)

        for numbers in by_settings.values():
            contexts = [requests[number].args[0] for number in numbers]
            settings = requests[numbers[0]].args[1]
            for place, text in self._continued(contexts, settings, engine_for):
                texts[numbers[place]] = text
                self.cache_hook.add_partial("generate_until", (contexts[place], settings), text)
                num_done += 1
                if progress is not None:
                    progress(num_done, len(requests))
        return texts

    def _continued(
        self,
        contexts: Sequence[str],
        settings: Mapping[str, Any],
        engine_for: Callable[["SamplingParams"], "Engine"],
    ) -> Iterator[tuple[int, str]]:
        """Yields (context index, continuation)."""
        from MaxText.inference.generate import StoppingCriteria, generate
        from MaxText.parallelism.mesh import microbatch_size

        kwargs = normalize_gen_kwargs(dict(settings), self.max_gen_toks)
        until = [stop for stop in kwargs.pop("until", None) or [] if stop]
        max_new_tokens = kwargs.pop("max_gen_toks")
        room = self.max_length - max_new_tokens
        if room <= 0:
            raise UserError(
                f"the task asks for up to {max_new_tokens} new tokens (max_gen_toks), but "
                f"max_target_length={self.max_length} includes the question. Set a smaller "
                "max_gen_toks in the task's generation_kwargs."
            )
        config = self._trained.config
        per_device = config.evaluation.eval_per_device_batch_size
        completions = generate(
            engine_for(_sampling_params(kwargs)),
            [(self.tok_encode(context) or [self._prefix_id])[-room:] for context in contexts],
            StoppingCriteria(max_new_tokens, self._eos_ids | {self._eot_id}, tuple(until)),
            batch_size=microbatch_size(config.batch, self._trained.sharding, per_device),
            seed=config.decoding.decode_seed,
            decode=self._text_tokenizer.decode_all,
        )
        for number, completion in completions:
            text = self._text_tokenizer.decode(completion.tokens)
            yield number, postprocess_generated_text(text, until, think_end_token=None)


def _sampling_params(kwargs: Mapping[str, Any]) -> "SamplingParams":
    """Converts a task's normalized generation_kwargs to sampling settings."""
    from MaxText.inference.sampling import SamplingParams

    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    sampled = kwargs.pop("do_sample")
    if unknown := sorted(set(kwargs) - set(_SAMPLING_KEYS)):
        raise UserError(
            f"generation_kwargs: {', '.join(unknown)} are not supported. Supported: until, "
            f"max_gen_toks, do_sample, {', '.join(_SAMPLING_KEYS)}."
        )
    if not sampled:
        # Greedy decoding in transformers uses only the penalty.
        return SamplingParams(
            temperature=0.0, repetition_penalty=kwargs.get("repetition_penalty", 1.0)
        )
    # transformers samples at temperature 1 by default.
    kwargs["temperature"] = kwargs.get("temperature") or 1.0
    return SamplingParams(**{_SAMPLING_KEYS[name]: value for name, value in kwargs.items()})


class _HarnessTokenizer:
    """Tokenizer mapping control tokens in a text to control ids.

    This is what transformers does. Training data encodes them as plain text (Tokenizer), so
    that no document can forge one; the harness's tasks spell them out on purpose.
    """

    def __init__(self, tokenizer: ModelTokenizer):
        self._plain = tokenizer.tokenizer
        self._tokenizer = tokenizer
        self._whole: tokenizers.Tokenizer | None = None
        if isinstance(self._plain, HuggingFaceTokenizer):
            self._whole = tokenizers.Tokenizer.from_str(self._plain.file_text)
            self._whole.no_truncation()
            self._whole.no_padding()

    def encode(self, text: str) -> list[int]:
        """Returns ids without the prefix."""
        if self._whole is None:
            return self._plain.encode([text])[0].tolist()
        return self._whole.encode(without_surrogates(text), add_special_tokens=False).ids

    def decode_all(self, ids: Sequence[int]) -> str:
        """Decodes ids, including control tokens."""
        return self._plain.decode(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids without control tokens."""
        if self._whole is None:
            return self._tokenizer.decode(ids)
        return self._whole.decode(list(ids), skip_special_tokens=True)
