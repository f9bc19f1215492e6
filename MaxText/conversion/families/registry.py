"""Supported families, and known unsupported ones with the reason."""

from MaxText.conversion.families.fattorib import FATTORIB
from MaxText.conversion.families.gpt import GPT2, GPT_NEO, GPT_NEOX
from MaxText.conversion.families.llama import GEMMA, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3
from MaxText.conversion.families.muddformer import MUDDFORMER, MUDDPYTHIA
from MaxText.conversion.families.tokenformer import TOKENFORMER
from MaxText.conversion.family import Family

# An export without `family=` tries them in this order.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2,
        GPT_NEO,
        GPT_NEOX,
        LLAMA,
        QWEN2,
        QWEN3,
        MISTRAL,
        MIXTRAL,
        GEMMA,
        TOKENFORMER,
        FATTORIB,
        MUDDFORMER,
        MUDDPYTHIA,
    )
}

# model_type -> missing part.
WITHOUT_PARTS = {
    "gemma2": "it has norms after its parts as well, and alternating windows",
    "gemma3_text": "it has norms after its parts as well, and alternating windows",
    "gemma3": "it reads images, and its text part has norms after its parts and alternating "
    "windows",
    "phi3": "its fused projections have no table",
    "phi": "its head has a bias, and its norm is shared by attention and MLP",
    "olmo": "its norms have no weights, and it clips queries, keys and values",
    "olmo2": "its norms stand after the parts, and those of queries and keys span all heads",
    "olmoe": "its norms of queries and keys span all heads",
    "qwen2_moe": "it has a shared expert besides the routed ones",
    "qwen3_moe": "experts together with norms of queries and keys have no table",
    "falcon": "its queries, keys and values are one projection, grouped by head",
    "gptj": "its rotary embedding turns neighboring dimensions, and its head has a bias",
    "opt": "its learned positions begin at 2",
    "bloom": "a norm follows its embedding, and its projections are fused by head",
    "mpt": "its queries, keys and values are one projection",
    "stablelm": "LayerNorms around a gated MLP have no table",
    "smollm3": "every fourth layer has no rotary embedding",
    "ministral": "its layers alternate between windows and full attention",
    "cohere": "its parallel blocks share one LayerNorm without a bias, and logits are scaled",
    "deepseek_v3": "it has multi-head latent attention and shared experts",
    "gpt_oss": "it has attention sinks and alternating windows",
    "mamba": "it has no attention: state-space layers are not here",
}
