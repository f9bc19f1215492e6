"""Mixers that are linear RNNs, with a decode state of fixed size, and what they share.

A part of each kind is one file: gated_delta_net.py, kda.py, mamba2.py. Shared are the one
computation of whole sequences, prompts and new tokens (recurrent_mixer.py), the short convolution
before the recurrence (short_convolution.py), the division of sequences into chunks of tokens and
the masks of documents (chunks.py), the states passed from chunk to chunk and from device to device
(state_passing.py), the inverse of triangular matrices (triangular_inverse.py), products of tokens
with a decay for each channel (decayed_products.py), and gated norms and decays (gates.py).
"""
