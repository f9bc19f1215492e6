"""Attention and the mixers that share its projections, masks and caches."""

from MaxText.layers.attention.attention import Attention

__all__ = ["Attention"]
