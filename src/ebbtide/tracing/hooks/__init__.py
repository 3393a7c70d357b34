"""Turns PyTorch's execution into events for an observer; knows no chunks.

Nothing in torch is patched and no tensor is subclassed: module hooks say when a module runs, a dict in place
of a module's parameter table says when a parameter is read by somebody else's forward, saved-tensor hooks
say when backward wants a weight, and post-accumulate hooks hand over gradients.
"""

from ebbtide.tracing.hooks.modules import Interceptor
from ebbtide.tracing.hooks.observer import Observer, ParameterRun, Unit, find_units

__all__ = ["Interceptor", "Observer", "ParameterRun", "Unit", "find_units"]
