"""Supported families."""

from MaxText.conversion.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from MaxText.conversion.families.delta_net import (
    OLMO_HYBRID,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)
from MaxText.conversion.families.fattorib import FATTORIB
from MaxText.conversion.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4
from MaxText.conversion.families.gpt import GPT2, GPT_NEO, GPT_NEOX
from MaxText.conversion.families.gpt_oss import GPT_OSS
from MaxText.conversion.families.kimi import KIMI_LINEAR
from MaxText.conversion.families.layer_norm import COHERE2, NEMOTRON, STABLELM, STARCODER2
from MaxText.conversion.families.llama import LLAMA
from MaxText.conversion.families.mamba import (
    BAMBA,
    FALCON_H1,
    GRANITEMOEHYBRID,
    MAMBA2,
    NEMOTRON_H,
)
from MaxText.conversion.families.mistral import MINISTRAL3, MISTRAL, MIXTRAL
from MaxText.conversion.families.muddformer import MUDDFORMER, MUDDPYTHIA
from MaxText.conversion.families.olmo import OLMO2, OLMO3
from MaxText.conversion.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from MaxText.conversion.families.relatives import (
    APERTUS,
    ARCEE,
    ERNIE4_5,
    EXAONE4,
    GLM4,
    GRANITE,
    GRANITEMOE,
    HUNYUAN_V1_DENSE,
    NANOCHAT,
    PHI3,
    SEED_OSS,
    SMOLLM3,
)
from MaxText.conversion.families.sigmoid_routing import GLM4_MOE, HY_V3, MINIMAX_M2
from MaxText.conversion.families.tokenformer import TOKENFORMER
from MaxText.conversion.family import Family

# An export without `family=` tries them in this order: of those that hold a model, the one that
# holds least comes first.
_IN_TRANSFORMERS = (
    GPT2,
    GPT_NEO,
    GPT_NEOX,
    LLAMA,
    QWEN2,
    QWEN3,
    MISTRAL,
    MIXTRAL,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    OLMO2,
    OLMO3,
    SMOLLM3,
    SEED_OSS,
    GRANITE,
    MINISTRAL3,
    PHI3,
    GLM4,
    ARCEE,
    ERNIE4_5,
    EXAONE4,
    APERTUS,
    HUNYUAN_V1_DENSE,
    NANOCHAT,
    STARCODER2,
    STABLELM,
    NEMOTRON,
    COHERE2,
    QWEN3_MOE,
    QWEN2_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    OLMO_HYBRID,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KIMI_LINEAR,
    GPT_OSS,
    GLM4_MOE,
    MINIMAX_M2,
    HY_V3,
    GRANITEMOE,
    MAMBA2,
    BAMBA,
    GRANITEMOEHYBRID,
    FALCON_H1,
    NEMOTRON_H,
)
_OTHERS = (TOKENFORMER, FATTORIB, MUDDFORMER, MUDDPYTHIA)
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (*_IN_TRANSFORMERS, *_OTHERS)
}
