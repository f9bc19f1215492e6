"""Names of MaxText's checkpoints, and the words of the command line about them.

Source: AI-Hypercomputer/maxtext, its layers and its checkpoint conversion; for slots TokenFormer's
and for dense connections MUDDFormer's JAX program, which were made from it.
"""

PREFIX = "maxtext:"

# Where the arrays of a step lie: MaxText, MUDDFormer's program, older versions of MaxText.
OF_MUDDFORMER = "state"
ITEMS = ("items", OF_MUDDFORMER, "default")

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
# Slots: ours -> theirs, without the kernel or bias at the end.
SLOT_NAMES = {
    "self_attention/query/keys": "self_attention/qkv_key_slot",
    "self_attention/key/keys": "self_attention/qkv_key_slot",
    "self_attention/value/keys": "self_attention/qkv_key_slot",
    "self_attention/query/values": "self_attention/q_value_slot",
    "self_attention/key/values": "self_attention/k_value_slot",
    "self_attention/value/values": "self_attention/v_value_slot",
    "self_attention/out/keys": "self_attention/proj_key_slot",
    "self_attention/out/values": "self_attention/proj_value_slot",
    "mlp/keys": "mlp/wi",
    "mlp/values": "mlp/wo",
}
# Those that share an array, [D, 3, n], or [3, n] of biases: which of the three they are.
SHARED_SLOTS = {
    "self_attention/query/keys": 0,
    "self_attention/key/keys": 1,
    "self_attention/value/keys": 2,
}
# Sums after a layer of ours, connections/after/{layer + 1}/ -> names of the layer in theirs.
CONNECTION_NAMES = {
    "norm/scale": "decoder/layers_{layer}/pre_dense_proj1_norm/scale",
    "wi/kernel": "decoder/layers_{layer}/dynamic_dense_conn1/kernel",
    "wo/kernel": "decoder/layers_{layer}/dynamic_dense_conn2/kernel",
    "static": "decoder/layers_{layer}/dense_proj2.bias",
    "post_norms/r/scale": "decoder/mudd_postnorm_{layer}/scale",
}
# Scales of the embedding and of each layer's output, rows of one array of ours.
SOURCE_NORM = "connections/source_norm/scale"
SOURCE_NORM_NAMES = ("decoder/mudd_prenorm/scale", "decoder/mudd_prenorm_{layer}/scale")
# Dimension of the layer in arrays of scanned layers: param_scan_axis.
LAYER_AXIS = 1

# Where the factor 1/sqrt(head_dim) of the attention scores is.
QUERY_SCALINGS = ("weights", "model")
