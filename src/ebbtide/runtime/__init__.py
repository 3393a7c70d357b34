"""Carrying out a plan. What is new gets its place here; `ebbtide.run` has the rest of it."""
