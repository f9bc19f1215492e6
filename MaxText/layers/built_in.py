"""The built-in parts by name. Imports no jax: classes are imported when a model is built."""

from MaxText.configuration.registry import register

for _name, _target, _help in (
    ("attention", "attention:Attention", "Softmax attention to all earlier tokens."),
    ("local_attention", "attention:LocalAttention", "Attention to sliding_window_size tokens."),
    ("linear_attention", "linear_attention:LinearAttention", "A state of fixed size (GPT-Neo)."),
    ("none", "part:Nothing", "No mixer: the layer has a feed-forward alone."),
):
    register("mixer", _name, target=f"MaxText.layers.{_target}", help=_help)

for _name, _target, _help in (
    ("dense", "dense:projection", "A matrix."),
    ("pattention", "pattention:projection", "Pattention over slots (TokenFormer)."),
):
    register("projection", _name, target=f"MaxText.layers.{_target}", help=_help)

for _name, _target, _help in (
    ("mlp", "feed_forward:MLP", "An MLP, plain or gated, or experts of them."),
    ("pattention", "pattention:PattentionFeedForward", "Pattention over slots (TokenFormer)."),
):
    register("feed_forward", _name, target=f"MaxText.layers.{_target}", help=_help)

for _name, _help in (
    ("adamw", "AdamW (Loshchilov and Hutter 2019)."),
    ("adafactor", "Adafactor (Shazeer and Stern 2018)."),
    ("lion", "Lion (Chen et al. 2023)."),
    ("muon", "Muon for matrices, AdamW for the rest (Jordan et al. 2024)."),
    ("sgd", "Stochastic gradient descent."),
):
    register("optimizer", _name, target=f"MaxText.training.optimizer:{_name}", help=_help)
