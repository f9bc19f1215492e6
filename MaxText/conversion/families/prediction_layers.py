"""Tables of the layers of multi-token prediction (training/multi_token_prediction.py).

Published files store them in two ways: as further layers behind the last one, with copies of the
token table and of the head (DeepSeek-V3, GLM-4.5), or as a model of its own beside the first one
(Qwen3-Next, Qwen3.5). Both project [embedding, hidden state]. transformers has no such layers, and
skips their tensors.

Letters: A the two inputs of the projection, B the width of each, C that of its output.
"""

from MaxText.conversion import family as hf
from MaxText.conversion.family import DEPTH, PredictionLayers, Rows


def _rows(embedding_norm: str, hidden_norm: str, projection: str, final_norm: str) -> Rows:
    """Returns the rows of a depth besides those of its block.

    Args:
      embedding_norm: Name of the norm of the embedding, without suffix.
      hidden_norm: That of the norm of the hidden state.
      projection: That of the projection.
      final_norm: That of the norm before the head.
    """
    return (
        *hf.norm(embedding_norm, f"{DEPTH}/embedding_norm"),
        *hf.norm(hidden_norm, f"{DEPTH}/hidden_norm"),
        hf.row(f"{projection}.weight", f"{DEPTH}/projection/kernel", "C (A B)", "A B C"),
        *hf.norm(final_norm, f"{DEPTH}/final_norm"),
    )


_BEHIND = "model.layers.{layer}."

BEHIND_THE_LAST = PredictionLayers(
    in_layer=_BEHIND,
    rows=_rows(
        f"{_BEHIND}enorm", f"{_BEHIND}hnorm", f"{_BEHIND}eh_proj", f"{_BEHIND}shared_head.norm"
    ),
    copies={
        f"{_BEHIND}embed_tokens.weight": "token_embedder/embedding",
        f"{_BEHIND}shared_head.head.weight": "logits_dense/kernel",
    },
)

BESIDE_THE_MODEL = PredictionLayers(
    in_layer="mtp.layers.0.",
    rows=_rows("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    most=1,
)


def count() -> hf.ConfigMapping:
    """Returns the setting of their number: written, and not read, as files may lack the layers."""
    return hf.without_key("num_nextn_predict_layers", lambda values: values["mtp_num_layers"])


def count_if_any(hf_name: str) -> hf.ConfigMapping:
    """Returns the setting of their number, which a model without them leaves out.

    Args:
      hf_name: The key of config.json.
    """
    return hf.without_key(hf_name, lambda values: values["mtp_num_layers"] or hf.OMITTED)
