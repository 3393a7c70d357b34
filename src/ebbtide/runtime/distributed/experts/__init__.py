"""Layers of experts that ranks have among them."""
