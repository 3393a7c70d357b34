"""Parameters outside the chunks: ordinary tensors on the device, updated with the same rule and kernels."""

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
        self, module: nn.Module, choice: Choice, backend: Backend, kernels: Kernels, rule: Rule
    ) -> None:
        self.module = module
        self.parameters = dict(choice.unmanaged)
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
                master = dense(value).to(self.device, torch.float32, copy=True)
                self.masters[name] = master
                flat = torch.empty_like(master, dtype=target)
                self.kernels.split(master, flat, master)
                parameter.data = flat.as_strided(value.shape, value.stride())
            else:
                parameter.data = value.to(self.device, target)
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
                child._buffers[key] = buffer.to(self.device, dtype)

    def fixed_bytes(self) -> int:
        """Bytes that are on the device in every moment."""
        tensors: list[torch.Tensor] = [p.detach() for p in self.parameters.values()]
        tensors += list(self.module.buffers())
        tensors += list(self.masters.values())
        tensors += [s for group in self.states.values() for s in group]
        return storage_bytes(tensors)

    def squares(self) -> dict[str, float]:
        """The sum of squares of each gradient that is there."""
        return {
            name: float(self.kernels.sum_of_squares(_laid(p.grad, p)))
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
            if name not in self.states:
                shape = (parameter.numel(),)
                self.states[name] = tuple(torch.zeros(shape, device=self.device) for _ in self.rule.states)
            self.steps[name] += 1
            coefficients = self.rule.coefficients(group, self.steps[name], scale)
            operands = Operands(
                dense(parameter), _laid(parameter.grad, parameter), self.masters.get(name), self.states[name]
            )
            self.kernels.update(self.rule, operands, coefficients)
        self.discard()

    def discard(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def _trainable(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.numel() > 0


def _laid(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return laid_like(gradient, tuple(parameter.shape), parameter.stride(), parameter.dtype)
