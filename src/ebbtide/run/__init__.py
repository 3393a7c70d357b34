"""Runs an iteration: chunks come when they are accessed or as the plan says, gradients and updates go through."""
