"""Activation checkpointing of a Hugging Face model, the same for training and for planning."""

from __future__ import annotations

from typing import Any

from ebbtide.errors import UnsupportedError


def checkpoint_activations(module: Any, name: str) -> None:
    if not getattr(module, "supports_gradient_checkpointing", False):
        raise UnsupportedError(f"--checkpoint-activations: {name} cannot checkpoint its layers")
    # Transformers 5 renamed it and will take the old name away.
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable({"use_reentrant": False})
