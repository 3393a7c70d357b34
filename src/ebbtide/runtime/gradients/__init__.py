"""Gradients, from where autograd leaves them to their update."""
