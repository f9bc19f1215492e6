"""Growth: initializes a larger model from a smaller one."""
