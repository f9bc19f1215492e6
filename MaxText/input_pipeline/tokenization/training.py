"""Trains a byte-level BPE."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from MaxText.errors import UserError
from MaxText.input_pipeline.tokenization.hugging_face import HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(
    sample: Sequence[str],
    vocab_size: int,
    origin: str,
    special_tokens: Sequence[str] = (END_OF_TEXT,),
    num_threads: int = 0,
) -> HuggingFaceTokenizer:
    """Trains a byte-level BPE: special tokens from id 0, then the 256 bytes, then merges.

    Deterministic. Has fewer than `vocab_size` ids if the sample has no more pairs to merge. The
    first special token ends (and may begin) documents. Raises UserError for invalid special tokens,
    or a too small `vocab_size`.
    """
    if not special_tokens or not all(special_tokens):
        raise UserError(
            f"tokenizer_special_tokens={list(special_tokens)} names no token, or an empty one. "
            f"Give at least the one that ends documents, for example {END_OF_TEXT}."
        )
    if len(set(special_tokens)) != len(special_tokens):
        raise UserError(
            f"tokenizer_special_tokens={list(special_tokens)} names a token twice. Leave one out."
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fewest = len(special_tokens) + len(alphabet)
    if vocab_size < fewest:
        raise UserError(
            f"tokenizer_vocab_size={vocab_size} has no room for {len(special_tokens)} special "
            f"tokens and 256 bytes. Set it to {fewest} or more."
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    settings = {"eos_token": special_tokens[0], "bos_token": special_tokens[0]}
    return HuggingFaceTokenizer(tokenizer.to_str(), origin, settings, num_threads)
