"""Growth: initializes a larger model from a smaller one.

See docs/how-to/train_and_grow_tokenformer.md.
"""
