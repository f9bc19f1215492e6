"""The "maxtext" model of lm-evaluation-harness (EleutherAI).

Results agree with the harness's "hf" model for the same weights in transformers.
"""

import functools
import itertools
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from MaxText.errors import UserError
from MaxText.evaluation.scores import Continuation, Progress, log_progress, rolling_windows
from MaxText.inference import checkpoint_config
from MaxText.inference.model_tokenizer import ModelTokenizer
from MaxText.inference.trained_model import Log, TrainedModel, load_model
from MaxText.input_pipeline.tokenization.hugging_face import HuggingFaceTokenizer
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
    from MaxText.inference.generate import StoppingCriteria
    from MaxText.inference.sampling import SamplingParams

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_NEXT_ARGUMENT = re.compile(r",(?=\s*[A-Za-z_]\w*=)")


@register_model("maxtext")
class MaxTextLM(TemplateLM):
    """A harness model of trained weights on the devices of this process.

        lm = MaxTextLM.open("load_parameters_path=maxtext_output/quickstart")
        lm_eval.simple_evaluate(model=lm, tasks=["lambada_openai"])

    `was_asked` tells whether a request came; errors before that are not caused by the model.
    """

    max_gen_toks = 256  # default number of new tokens, as in the harness's own models

    def __init__(self, trained: TrainedModel, tokenizer: ModelTokenizer, log: Log = print):
        """Takes the results of load_model and open_tokenizer."""
        from MaxText.evaluation.scorers import Scorer

        super().__init__()
        self._trained = trained
        self._tokenizer = tokenizer
        self._log = log
        self._scorer = Scorer(trained)
        self.max_length = self._scorer.window
        self._encode, self._decode = _with_control_tokens(tokenizer)
        self._prefix_id = tokenizer.prefix_token_id()
        self.was_asked = False

    @classmethod
    def open(cls, arguments: str | Sequence[str], log: Log = print) -> "MaxTextLM":
        """Opens weights by arguments of eval.py, as one string or several."""
        argument_list = shlex.split(arguments) if isinstance(arguments, str) else list(arguments)
        loaded = checkpoint_config.load(argument_list)
        start_up.choose_platform(loaded.config.run.hardware)
        trained = load_model(loaded.config, log)
        return cls(trained, trained.open_tokenizer(typed=loaded.typed("tokenizer_path")), log)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> "MaxTextLM":
        """Opens weights from the harness's model_args string, key=value,key=value."""
        arguments = [argument.strip() for argument in _NEXT_ARGUMENT.split(arg_string)]
        return cls.open([argument for argument in arguments if argument])

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "MaxTextLM":
        """Opens weights from the harness's model_args dict."""
        return cls.open([f"{name}={value}" for name, value in arg_dict.items()])

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        eos_id = self._tokenizer.tokenizer.entry.eos_id
        ids = (eos_id, *self._tokenizer.eos_ids, self._prefix_id)
        return next(i for i in ids if i is not None)

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context."""
        return self._prefix_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns ids, adding the prefix unless the text starts with it.

        Control tokens spelled out in the text become their ids, as in transformers.
        """
        if add_special_tokens is None:
            prefix = self._tokenizer.tokenizer.decode([self._prefix_id])
            add_special_tokens = not string.startswith(prefix)
        ids = self._encode(string)
        return [*self._tokenizer.prefix, *ids] if add_special_tokens else ids

    def _start_progress(self, request_type: str, disable_tqdm: bool) -> Progress:
        """Notes that a request came and returns the progress log of its kind."""
        self.was_asked = True
        return log_progress(request_type, (lambda line: None) if disable_tqdm else self._log)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Returns (log-probability in nats, whether it is the greedy answer) of each request.

        A request is ((context, continuation) as text, ids of the context, ids to score). Raises
        UserError for an answer longer than the window.
        """
        progress = self._start_progress("loglikelihood", disable_tqdm)
        continuations = []
        for texts, context, ids in requests:
            if not 0 < len(ids) <= self.max_length:
                raise UserError(
                    f"the answer {texts[1][:60]!r} has {len(ids)} tokens; it must have between 1 "
                    f"and max_target_length={self.max_length}."
                )
            continuations.append(Continuation(context or [self._prefix_id], ids))
        scores = self._scorer.score_continuations(continuations, progress)
        answers = [(score.log_probability, score.is_greedy) for score in scores]
        for (texts, *_), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the total log-probability of each text, over disjoint windows."""
        progress = self._start_progress("loglikelihood_rolling", disable_tqdm)
        windows_by_text = [
            rolling_windows(self.tok_encode(request.args[0]), self._prefix_id, self.max_length)
            for request in requests
        ]
        windows = list(itertools.chain(*windows_by_text))
        scores = iter(self._scorer.score_continuations(windows, progress))
        totals = []
        for request, text_windows in zip(requests, windows_by_text, strict=True):
            text_scores = itertools.islice(scores, len(text_windows))
            total = math.fsum(score.log_probability for score in text_scores)
            totals.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns continuations up to the first stop string of the task.

        Requests with equal settings are generated together. Holds the weights on device twice
        meanwhile, because generation uses unstacked parameters.
        """
        import jax
        import jax.numpy as jnp

        from MaxText.inference.engine import Engine
        from MaxText.inference.generate import generate
        from MaxText.parallelism.mesh import microbatch_size

        progress = self._start_progress("generate_until", disable_tqdm)
        num_done = itertools.count(1)
        indices_by_settings: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            indices_by_settings.setdefault(repr(request.args[1]), []).append(index)
        trained = self._trained
        config = self._trained.config
        # Copied because `unstack_params` donates its argument, and scoring still needs the weights.
        unstacked_params = trained.model.unstack_params(jax.tree.map(jnp.copy, trained.params))
        num_ids = self._tokenizer.tokenizer.entry.vocab_size

        @functools.cache
        def engine_for(sampling: "SamplingParams") -> Engine:
            return Engine(
                trained.model, unstacked_params, trained.sharding, sampling, num_ids=num_ids
            )

        per_device = config.evaluation.eval_per_device_batch_size
        texts = [""] * len(requests)
        for indices in indices_by_settings.values():
            sampling, stopping = self._generation_settings(requests[indices[0]].args[1])
            max_context = self.max_length - stopping.max_new_tokens
            contexts = [self.tok_encode(requests[index].args[0]) for index in indices]
            completions = generate(
                engine_for(sampling),
                [(ids or [self._prefix_id])[-max_context:] for ids in contexts],
                stopping,
                batch_size=microbatch_size(config.batch, trained.sharding, per_device),
                seed=config.decoding.decode_seed,
                decode=self._tokenizer.tokenizer.decode,
            )
            for prompt_index, completion in completions:
                index = indices[prompt_index]
                text = self._decode(completion.tokens)
                text = postprocess_generated_text(text, stopping.stop_strings, think_end_token=None)
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                progress(next(num_done), len(requests))
        return texts

    def _generation_settings(
        self, generation_kwargs: Mapping[str, Any]
    ) -> tuple["SamplingParams", "StoppingCriteria"]:
        """Converts a task's generation_kwargs.

        Raises UserError for unsupported ones, and for more new tokens than the window holds.
        """
        from MaxText.inference.generate import StoppingCriteria
        from MaxText.inference.sampling import SamplingParams

        kwargs = normalize_gen_kwargs(dict(generation_kwargs), self.max_gen_toks)
        until = tuple(stop for stop in kwargs.pop("until", None) or () if stop)
        max_new_tokens = kwargs.pop("max_gen_toks")
        if max_new_tokens >= self.max_length:
            raise UserError(
                f"the task asks for up to {max_new_tokens} new tokens (max_gen_toks), but "
                f"max_target_length={self.max_length} includes the question. Set a smaller "
                "max_gen_toks in the task's generation_kwargs."
            )
        eos_ids = frozenset([*self._tokenizer.eos_ids, self.eot_token_id])
        stopping = StoppingCriteria(max_new_tokens, eos_ids, until)
        do_sample = kwargs.pop("do_sample")
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if unknown := sorted(set(kwargs) - set(_SAMPLING_KEYS)):
            raise UserError(
                f"generation_kwargs: {', '.join(unknown)} are not supported. Supported: until, "
                f"max_gen_toks, do_sample, {', '.join(_SAMPLING_KEYS)}."
            )
        if not do_sample:
            # Greedy decoding in transformers uses only the penalty.
            penalty = kwargs.get("repetition_penalty", 1.0)
            return SamplingParams(temperature=0.0, repetition_penalty=penalty), stopping
        # transformers samples at temperature 1 by default.
        kwargs["temperature"] = kwargs.get("temperature") or 1.0
        nucleus_p = kwargs.pop("top_p", 1.0)
        return SamplingParams(**kwargs, nucleus_p=nucleus_p), stopping


def _with_control_tokens(
    tokenizer: ModelTokenizer,
) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Returns an encoder, and a decoder without control tokens.

    Control tokens in a text become control ids, as in transformers. Training data encodes them as
    plain text (Tokenizer), so that no document can forge one; the harness's tasks spell them out on
    purpose.
    """
    plain_tokenizer = tokenizer.tokenizer
    if isinstance(plain_tokenizer, HuggingFaceTokenizer):
        return plain_tokenizer.control_token_codec()
    return lambda text: plain_tokenizer.encode([text])[0].tolist(), tokenizer.decode
