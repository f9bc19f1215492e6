"""Supported families."""

from MaxText.conversion.families.fattorib import FATTORIB
from MaxText.conversion.families.gpt import GPT2, GPT_NEO, GPT_NEOX
from MaxText.conversion.families.llama import GEMMA, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3
from MaxText.conversion.families.muddformer import MUDDFORMER, MUDDPYTHIA
from MaxText.conversion.families.tokenformer import TOKENFORMER
from MaxText.conversion.family import Family

_IN_TRANSFORMERS = (GPT2, GPT_NEO, GPT_NEOX, LLAMA, QWEN2, QWEN3, MISTRAL, MIXTRAL, GEMMA)
_OTHERS = (TOKENFORMER, FATTORIB, MUDDFORMER, MUDDPYTHIA)
# An export without `family=` tries them in this order.
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (*_IN_TRANSFORMERS, *_OTHERS)
}
