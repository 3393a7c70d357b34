"""Carrying out a plan: parameters, moves, gradients, updates, activations, ranks, and the session that leads passes.

A room imports from those to its left only: parameters, movement, gradients and activations, updates, distributed,
planning, then what puts them together (`build`) and leads passes through them (`session`).
"""
