"""Growth: parameters of a smaller model as the start of a larger one (docs/growth.md)."""
