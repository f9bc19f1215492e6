"""The built-in parts by name. Imports no jax: classes are imported when a model is built."""

from MaxText.configuration.registry import register

for _kind, _name, _target in (
    ("mixer", "attention", "layers.attention:Attention"),
    ("mixer", "local_attention", "layers.attention:LocalAttention"),
    ("mixer", "linear_attention", "layers.linear_attention:LinearAttention"),
    ("mixer", "none", "layers.part:Nothing"),
    ("projection", "dense", "layers.dense:projection"),
    ("projection", "pattention", "layers.pattention:PattentionProjection"),
    ("norm", "rms_norm", "layers.normalization:rms_norm"),
    ("norm", "layer_norm", "layers.normalization:layer_norm"),
    ("norm", "scale_norm", "layers.normalization:scale_norm"),
    ("norm", "scale_norm_centered", "layers.normalization:scale_norm_centered"),
    ("position", "rotary", "layers.rotary:Rotary"),
    ("position", "learned", "layers.position_tables:LearnedPositions"),
    ("position", "axial", "layers.position_tables:AxialPositions"),
    ("position", "alibi", "layers.alibi:ALiBi"),
    ("position", "none", "layers.part:Position"),
    ("connection", "residual", "layers.part:ResidualStream"),
    ("connection", "dense", "layers.connections:DenseConnections"),
    ("feed_forward", "mlp", "layers.feed_forward:MLP"),
    ("feed_forward", "pattention", "layers.pattention:PattentionFeedForward"),
    ("head", "linear", "layers.head:LinearHead"),
    ("head", "head_qk", "layers.head_qk:HeadQK"),
    ("objective", "cross_entropy", "training.objective:cross_entropy_losses"),
    ("objective", "entmax", "training.objective:entmax_losses"),
    ("optimizer", "adamw", "training.optimizer:adamw"),
    ("optimizer", "adafactor", "training.optimizer:adafactor"),
    ("optimizer", "lion", "training.optimizer:lion"),
    ("optimizer", "muon", "training.optimizer:muon"),
    ("optimizer", "sgd", "training.optimizer:sgd"),
):
    register(_kind, _name, target=f"MaxText.{_target}")
