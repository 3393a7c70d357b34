"""Host modules: computed where their weights live, so that activations cross the link instead of weights.

A large embedding reads a few rows a step; sending it to the device for that is waste. What goes in is brought
to the host, what comes out to the device, and gradients take the way back by themselves. A weight that is tied
to another module makes that module a host module, too: it would otherwise be needed on both sides.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ebbtide.errors import ConfigError, nearest
from ebbtide.memory.links import Traffic


def find_hosted(module: nn.Module, patterns: Collection[str]) -> dict[str, nn.Module]:
    """The modules that match, with their children's parameters, and those that share a parameter with them."""
    named = dict(module.named_modules())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ConfigError(f"host_modules: {pattern!r} matches no module{nearest(pattern, named)}")
    found = {n: m for n, m in named.items() if any(fnmatchcase(n, p) for p in patterns)}
    if "" in found:
        raise ConfigError(
            "host_modules: the whole model matches; name the modules, a large embedding for instance"
        )
    shared = {id(p) for child in found.values() for p in child.parameters()}
    inside = {id(part) for child in found.values() for part in child.modules()}
    for name, child in named.items():
        if id(child) not in inside and any(id(p) in shared for p in child.parameters(recurse=False)):
            found[name] = child
    return found


class HostModules:
    """The hooks that carry inputs and outputs over, and count them."""

    def __init__(self, modules: Collection[nn.Module], device: torch.device, traffic: Traffic) -> None:
        self._device = device
        self._traffic = traffic
        self.handles: list[Any] = []
        for module in modules:
            self.handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._after))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def bring(tensor: torch.Tensor) -> torch.Tensor:
            self._count(tensor, "device_to_host", "host_to_device")
            return tensor.to("cpu")

        return tree_map_only(torch.Tensor, bring, (args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        def send(tensor: torch.Tensor) -> torch.Tensor:
            self._count(tensor, "host_to_device", "device_to_host")
            return tensor.to(self._device)

        return tree_map_only(torch.Tensor, send, output)

    def _count(self, tensor: torch.Tensor, there: str, back: str) -> None:
        """The tensor's way, and its gradient's way back."""
        if isinstance(tensor, torch._subclasses.FakeTensor):
            return
        self._traffic.count(there, tensor.nbytes)
        if tensor.requires_grad:
            self._traffic.count(back, tensor.nbytes)
