"""Passes under fake tensors: what an iteration would do, before it runs."""
