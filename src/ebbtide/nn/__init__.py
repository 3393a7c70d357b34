"""Parts of models that need less memory than torch's own, on any module, with the engine or without."""

from ebbtide.nn.blockwise_loss import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
