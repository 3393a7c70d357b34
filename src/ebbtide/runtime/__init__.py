"""Carrying out a plan: parameters, moves, gradients, updates, activations, ranks, and the session that leads passes.

A package imports from those to its left only: parameters, movement, gradients and activations, updates, distributed,
`budgets` and `process_tiers`, planning, `takeover` and `fast_path`, then what puts them together (`build`), leads
passes through them (`session`) and says what happened (`stats`).
"""
