"""Growth: initializes a larger model from the parameters of a smaller one (docs/growth.md)."""
