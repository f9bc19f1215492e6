"""Names of MaxText's checkpoints, and the words of the command line about them.

Source: AI-Hypercomputer/maxtext, its layers and its checkpoint conversion.
"""

PREFIX = "maxtext:"

# Where the arrays of a step lie: MaxText, its older versions, programs made from it.
ITEMS = ("items", "state", "default")

# Names of ours outside of layers -> names in their tree.
NAMES = {
    "token_embedder/embedding": "token_embedder/embedding",
    "position_embedder/embedding": "decoder/position_embedder/embedding",
    "decoder_norm/scale": "decoder/decoder_norm/scale",
    "decoder_norm/bias": "decoder/decoder_norm/bias",
    "logits_dense/kernel": "decoder/logits_dense/kernel",
}
# normalization_type -> part of a layer of ours -> its name in theirs. Llama's layer names the norm
# before the MLP by what comes before it; that of gpt3, the one with LayerNorm, has it in the MLP.
LAYER_NAMES = {
    "rms_norm": {"pre_mlp_layer_norm": "post_self_attention_layer_norm"},
    "layer_norm": {
        "pre_self_attention_layer_norm": "pre_self_attention_norm",
        "pre_mlp_layer_norm": "mlp/mlp_layer_norm",
    },
}
# Dimension of the layer in arrays of scanned layers: param_scan_axis.
LAYER_AXIS = 1

# Where the factor 1/sqrt(head_dim) of the attention scores is.
QUERY_SCALINGS = ("weights", "model")
