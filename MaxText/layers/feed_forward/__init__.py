"""Feed-forward layers: MLP, mixture of experts, Pattention."""
