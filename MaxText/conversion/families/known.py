"""The families that have a table, and those that are refused for a reason worth saying."""

from MaxText.conversion.families.gpt2 import GPT2
from MaxText.conversion.families.gpt_neox import GPT_NEOX
from MaxText.conversion.families.llama import LLAMA
from MaxText.conversion.families.mistral import MISTRAL
from MaxText.conversion.families.qwen import QWEN2, QWEN3
from MaxText.conversion.family import Family

# In the order in which an export without `family=` tries them.
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (GPT2, GPT_NEOX, LLAMA, QWEN2, QWEN3, MISTRAL)
}

# model_type -> what our parts lack.
WITHOUT_PARTS = {
    "gemma": "its norms multiply by 1 + weight and its embeddings by sqrt(hidden_size); there are "
    "no such parts here, and folding both into the weights would change their bits",
    "gemma2": "it has norms after its parts, alternating windows and scaled embeddings",
    "gemma3_text": "it has norms after its parts, alternating windows and scaled embeddings",
    "mixtral": "it is a mixture of experts",
    "gpt_neo": "it alternates local and global attention without scaling the scores",
    "phi3": "its fused projections have no table",
}
