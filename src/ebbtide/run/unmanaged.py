"""Parameters outside the chunks: ordinary tensors, updated with the same rule and kernels.

They are on the device in every moment, but for those of host modules, which stay on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ebbtide.backend import Backend
from ebbtide.kernels import Kernels, Operands, Rule
from ebbtide.run.model import dense, laid_like
from ebbtide.run.setup import Choice
from ebbtide.tracing.meter import storage_bytes


class Unmanaged:
    def __init__(
        self, module: nn.Module, choice: Choice, backend: Backend, kernels: Mapping[str, Kernels], rule: Rule
    ) -> None:
        self.module = module
        self.parameters = dict(choice.unmanaged)
        on_host = {id(p) for child in choice.hosted.values() for p in child.parameters()}
        self.hosted = {name for name, p in self.parameters.items() if id(p) in on_host}
        self._hosted_modules = {id(part) for child in choice.hosted.values() for part in child.modules()}
        self.device = backend.device
        self.kernels = kernels
        self.rule = rule
        self.masters: dict[str, torch.Tensor] = {}
        self.states: dict[str, tuple[torch.Tensor, ...]] = {}
        self.steps = dict.fromkeys(self.parameters, 0)
        self.storages: set[int] = set()

    def take_over(self, choice: Choice) -> None:
        """Brings parameters and buffers to the device and into their dtype, as `module.to` would."""
        for name, parameter in self.parameters.items():
            target = choice.dtypes[name]
            value = parameter.detach()
            if (
                value.is_floating_point()
                and target in (torch.bfloat16, torch.float16)
                and _trainable(parameter)
            ):
                master = dense(value).to(self._device(name), torch.float32, copy=True)
                self.masters[name] = master
                flat = torch.empty_like(master, dtype=target)
                self.kernels_of(name).split(master, flat, master)
                parameter.data = flat.as_strided(value.shape, value.stride())
            else:
                parameter.data = value.to(self._device(name), target)
            self.storages.add(parameter.untyped_storage()._cdata)
        for child in self.module.modules():
            for key, buffer in child._buffers.items():
                if buffer is None:
                    continue
                dtype = (
                    choice.buffer_dtype
                    if choice.buffer_dtype and buffer.is_floating_point()
                    else buffer.dtype
                )
                device = torch.device("cpu") if id(child) in self._hosted_modules else self.device
                child._buffers[key] = buffer.to(device, dtype)

    def _device(self, name: str) -> torch.device:
        return torch.device("cpu") if name in self.hosted else self.device

    def kernels_of(self, name: str) -> Kernels:
        return self.kernels["host" if name in self.hosted else "device"]

    def host_bytes(self, dtypes: Mapping[str, torch.dtype]) -> int:
        """What host modules take on the host: parameters, and what training adds to them."""
        total = 0
        for name in self.hosted:
            parameter, size = self.parameters[name], dtypes[name].itemsize
            trained = _trainable(parameter)
            master = 4 if trained and size == 2 else 0
            total += parameter.numel() * (
                size + (size + master + 4 * len(self.rule.states) if trained else 0)
            )
        return total

    def fixed_bytes(self) -> int:
        """Bytes that are on the device in every moment."""
        names = [name for name in self.parameters if name not in self.hosted]
        tensors: list[torch.Tensor] = [self.parameters[name].detach() for name in names]
        tensors += list(self.module.buffers())
        tensors += [self.masters[name] for name in names if name in self.masters]
        tensors += [state for name in names for state in self.states.get(name, ())]
        return storage_bytes(tensors)

    def squares(self) -> dict[str, float]:
        """The sum of squares of each gradient that is there."""
        return {
            name: float(self.kernels_of(name).sum_of_squares(_laid(p.grad, p)))
            for name, p in self.parameters.items()
            if p.grad is not None
        }

    def nonfinite(self) -> list[str]:
        return [name for name, total in self.squares().items() if not math.isfinite(total)]

    def apply(self, groups: Sequence[Mapping[str, Any]], scale: float) -> None:
        group_of = {id(p): group for group in groups for p in group["params"]}
        for name, parameter in self.parameters.items():
            group = group_of.get(id(parameter))
            if parameter.grad is None or group is None:
                continue
            self.open_states(name)
            self.steps[name] += 1
            coefficients = self.rule.coefficients(group, self.steps[name], scale)
            operands = Operands(
                dense(parameter), _laid(parameter.grad, parameter), self.masters.get(name), self.states[name]
            )
            self.kernels_of(name).update(self.rule, operands, coefficients)
        self.discard()

    def open_states(self, name: str) -> None:
        """Optimizer state of a parameter that had no update yet: zeros."""
        if name not in self.states:
            shape, device = (self.parameters[name].numel(),), self._device(name)
            self.states[name] = tuple(torch.zeros(shape, device=device) for _ in self.rule.states)

    def write(self, name: str, value: torch.Tensor) -> None:
        """A new value, rounded as an update's is."""
        parameter, master = self.parameters[name].detach(), self.masters.get(name)
        if master is None:
            parameter.copy_(value)
            return
        laid = torch.empty_strided(parameter.shape, parameter.stride())
        master.copy_(dense(laid.copy_(value)))
        self.kernels_of(name).split(master, dense(parameter), master)

    def discard(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def _trainable(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.numel() > 0


def _laid(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return laid_like(gradient, tuple(parameter.shape), parameter.stride(), parameter.dtype)
