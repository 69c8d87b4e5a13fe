"""``zs.grad`` and ``zs.value_and_grad``: gradients with respect to arrays, variables
and tables."""
