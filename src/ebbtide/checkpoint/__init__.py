"""Weights and state, in and out: by name, in folders, from the meta device."""
