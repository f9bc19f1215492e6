"""How many floating point operations a training step needs, by MaxText's rule.

Counted: products of matrices, 2 operations per multiply-add, times 3 for training (forward, and
backward with respect to inputs and weights). Attention scores under a causal mask count half. The
head counts, also when it is the token table; looking up that table, norms, biases, softmax and
activation functions do not count, and neither does what rematerialisation computes twice.

Per token, with P weights that tokens are multiplied with, L layers, N query heads of H dimensions
and sequences of T tokens:

    weights     3 * 2 * P                     = 6 P
    attention   3 * 2 * 2 * L * N * H * S     = 12 L N H S

where a query sees S keys on average: T without a mask, T/2 under a causal mask (MaxText's rule;
exactly (T+1)/2), W - W^2/(2T) with a causal window of W tokens. Two products per layer, q k^T and
probabilities times v, give the second 2. A whole sequence under a causal mask thus costs
12 B T^2 N H / 2 per layer.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """Operations of training on one token.

    Attributes:
      weights: of products with weights.
      attention: of queries with keys, and probabilities with values.
    """

    weights: float
    attention: float

    @classmethod
    def from_model(
        cls,
        matmul_parameters: int,
        *,
        num_layers: int,
        num_query_heads: int,
        head_dim: int,
        sequence_length: int,
        causal: bool = True,
        window: int | None = None,
    ) -> "FlopCount":
        """Counts for any model whose layers have attention of one kind.

        Args:
          matmul_parameters: weights that each token is multiplied with, over all layers, with the
            head, without tables that are looked up, norms and biases.
          num_layers: layers with attention.
          sequence_length: T, in tokens.
          causal: whether a token sees only earlier ones.
          window: keys a query may see, itself included; None is all of them.
        """
        T = sequence_length
        visible = min(window or T, T)
        keys_per_query = visible - visible**2 / (2 * T) if causal else float(visible)
        return cls(
            weights=6.0 * matmul_parameters,
            attention=12.0 * num_layers * num_query_heads * head_dim * keys_per_query,
        )

    @property
    def per_token(self) -> float:
        """All operations of training on one token."""
        return self.weights + self.attention

    def tflops(self, num_tokens: float) -> float:
        """1e12 operations of training on this many tokens."""
        return self.per_token * num_tokens / 1e12

    def line(self, num_tokens: float) -> str:
        """MaxText's line for a step of this many tokens on a device."""
        share = 100 * self.weights / self.per_token
        return (
            f"Per train step: Total TFLOPs: {self.tflops(num_tokens):.2f} split as {share:.2f}% "
            f"learnable weight flops and {100 - share:.2f}% attention flops"
        )
