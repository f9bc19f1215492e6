"""The families that have a table, and those that are refused for a reason worth saying."""

from MaxText.conversion.families.fattorib import FATTORIB
from MaxText.conversion.families.gemma import GEMMA
from MaxText.conversion.families.gpt2 import GPT2
from MaxText.conversion.families.gpt_neo import GPT_NEO
from MaxText.conversion.families.gpt_neox import GPT_NEOX
from MaxText.conversion.families.llama import LLAMA
from MaxText.conversion.families.mistral import MISTRAL
from MaxText.conversion.families.mixtral import MIXTRAL
from MaxText.conversion.families.muddformer import MUDDFORMER, MUDDPYTHIA
from MaxText.conversion.families.qwen import QWEN2, QWEN3
from MaxText.conversion.families.tokenformer import TOKENFORMER
from MaxText.conversion.family import Family

# In the order in which an export without `family=` tries them.
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

# model_type -> what our parts lack.
WITHOUT_PARTS = {
    "gemma2": "it has norms after its parts as well, and alternating windows",
    "gemma3_text": "it has norms after its parts as well, and alternating windows",
    "gemma3": "it reads pictures, and its text part has norms after its parts and alternating "
    "windows",
    "phi3": "its fused projections have no table",
}
