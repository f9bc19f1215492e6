"""Attention and the mixers that share its projections, masks and caches.

Import from the modules: `attention.py` has the mixer, `attention_core.py` softmax attention in
blocks, `flash_attention.py` fused kernels, `ring_attention.py` sequences divided over devices,
`latent_attention.py`, `linear_attention.py` and `static_sgu.py` further mixers. The package itself
imports none of them, so that `kv_cache.py` can import one while another imports the caches.
"""
