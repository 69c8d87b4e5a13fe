"""``zs.grad`` and its kin: gradients with respect to variables, tables and all."""
