"""Tiny Hugging Face checkpoints with a tokenizer, and runs imported from them."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.conversion.small_folders import random, write

END = "<|endoftext|>"


def byte_level(with_bos: bool = False) -> tokenizers.Tokenizer:
    """256 bytes, each an id of its own, and END as id 256; `with_bos` puts END before texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END} $A", special_tokens=[(END, 256)]
        )
    return tokenizer


def llama_folder(folder: Path, with_bos: bool = False, seed: int = 0) -> Path:
    """A Llama of two layers with random weights, its tokenizer and generation_config.json."""
    config, tensors = random("llama")
    config |= {"vocab_size": 260, "attention_bias": False, "mlp_bias": False}
    generator = np.random.default_rng(seed)
    tensors = {name: value for name, value in tensors.items() if not name.endswith(".bias")}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = generator.standard_normal((260, 16), np.float32)
    write(folder, config, tensors)
    byte_level(with_bos).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 3]}))
    return folder
