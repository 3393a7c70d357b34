"""Ranks that share chunks: gathers, reductions, and what they agree on."""
