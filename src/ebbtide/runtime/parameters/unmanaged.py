"""Parameters outside the chunks: ordinary tensors, updated with the same rule and kernels.

They are on the device in every moment, but for those of host modules, which stay on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ebbtide.devices import Backend
from ebbtide.kernels import Kernels, Operands, Rule
from ebbtide.runtime.parameters.binding import dense, laid_like
from ebbtide.runtime.parameters.inplace_writes import follow
from ebbtide.runtime.parameters.selection import Choice, is_dense
from ebbtide.tracing.meter import storage_bytes

HALVES = (torch.bfloat16, torch.float16)


class Unmanaged:
    def __init__(
        self,
        module: nn.Module,
        choice: Choice,
        backend: Backend,
        kernels: Mapping[str, Kernels],
        rule: Rule,
        accumulates: bool,
    ) -> None:
        """`accumulates`: gradients are there from one batch to the next."""
        self.module = module
        self.parameters = dict(choice.unmanaged)
        self.originals = {name: parameter.dtype for name, parameter in self.parameters.items()}
        on_host = {id(p) for child in choice.hosted.values() for p in child.parameters()}
        self.hosted = {name for name, p in self.parameters.items() if id(p) in on_host}
        self._hosted_modules = {id(part) for child in choice.hosted.values() for part in child.modules()}
        self.device = backend.device
        self.kernels = kernels
        self.rule = rule
        self._accumulates = accumulates
        self.masters: dict[str, torch.Tensor] = {}
        self.states: dict[str, tuple[torch.Tensor, ...]] = {}
        self.steps = dict.fromkeys(self.parameters, 0)
        self._grouped: set[str] = set()
        """Those that the engine's optimizer has; the others may be another's."""
        self._buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        """As they came; where that is another dtype than here, in RAM."""

    def take_over(self, choice: Choice) -> None:
        """Brings parameters and buffers to the device and into their dtype, as `module.to` would."""
        for name, parameter in self.parameters.items():
            target = choice.dtypes[name]
            value = parameter.detach()
            trained = _trainable(parameter)
            # Frozen ones, too, are rounded as those in chunks are.
            rounded = trained or (value.dtype != target and is_dense(value))
            if value.is_floating_point() and target in HALVES and rounded:
                master = dense(value).to(self._device(name), torch.float32, copy=True)
                flat = torch.empty_like(master, dtype=target)
                self.kernels_of(name).split(master, flat, master)
                parameter.data = flat.as_strided(value.shape, value.stride())
                if trained:
                    self.masters[name] = master
            else:
                parameter.data = value.to(self._device(name), target)
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
                here = buffer.to(device, dtype)
                self._buffers.append((child, key, here if buffer.dtype == dtype else buffer.cpu()))
                child._buffers[key] = here

    def hand_back(self, own: Mapping[str, torch.Tensor]) -> None:
        """The module is an ordinary one again: parameters have these values, and buffers are in RAM, as they came."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            parameter.data = own[name]
        for child, key, before in self._buffers:
            buffer = child._buffers.get(key)
            if buffer is not None:
                found = buffer.cpu()
                # A buffer that was not written since is as exact as it came.
                same = before.dtype != found.dtype and torch.equal(before.to(found.dtype), found)
                child._buffers[key] = before if same else found.to(before.dtype)

    def _device(self, name: str) -> torch.device:
        return torch.device("cpu") if name in self.hosted else self.device

    def kernels_of(self, name: str) -> Kernels:
        return self.kernels["host" if name in self.hosted else "device"]

    def device_bytes(self, choice: Choice) -> int:
        """What they take on the device once they are taken over, before the first update."""
        total = sum(
            self._begun(name, choice.dtypes[name]) for name in self.parameters if name not in self.hosted
        )
        for child in self.module.modules():
            if id(child) not in self._hosted_modules:
                total += sum(b.nbytes for b in child._buffers.values() if b is not None)
        return total

    def host_bytes(self, dtypes: Mapping[str, torch.dtype]) -> int:
        """What host modules take on the host: parameters, and what training adds to them."""
        total = 0
        for name in self.hosted:
            parameter, dtype = self.parameters[name], dtypes[name]
            total += self._begun(name, dtype)
            if _trainable(parameter):
                total += parameter.numel() * (dtype.itemsize + 4 * len(self.rule.states))
        return total

    def _begun(self, name: str, dtype: torch.dtype) -> int:
        """Bytes of a parameter that is taken over in a dtype, with its master."""
        parameter = self.parameters[name]
        master = 4 if dtype in HALVES and _trainable(parameter) else 0
        return parameter.numel() * (dtype.itemsize + master)

    def fixed_bytes(self) -> int:
        """Bytes that are on the device in every moment of training: state that the first update makes, too."""
        names = [name for name in self.parameters if name not in self.hosted]
        tensors: list[torch.Tensor] = [self.parameters[name].detach() for name in names]
        tensors += list(self.module.buffers())
        tensors += [self.masters[name] for name in names if name in self.masters]
        tensors += [state for name in names for state in self.states.get(name, ())]
        held = sum(self._gradient(name) for name in names if self.parameters[name].grad is not None)
        return storage_bytes(tensors) + held + self.missing_bytes()

    def _gradient(self, name: str) -> int:
        """Bytes of a gradient that stays from one batch to the next."""
        parameter = self.parameters[name]
        return parameter.nbytes if self._accumulates and _trainable(parameter) else 0

    def gradients(self) -> set[int]:
        """Storages of such gradients."""
        grads = [p.grad for name, p in self.parameters.items() if p.grad is not None and self._gradient(name)]
        return {grad.untyped_storage()._cdata for grad in grads if grad.layout == torch.strided}

    def storages(self) -> set[int]:
        """Of parameters, as they are now: by address of the storage's object."""
        return {parameter.untyped_storage()._cdata for parameter in self.parameters.values()}

    def missing_bytes(self) -> int:
        """Of these, what is not there yet."""
        return sum(self._missing(name) for name in self.parameters if name not in self.hosted)

    def _missing(self, name: str) -> int:
        """Bytes of master and optimizer state that training adds, and of a gradient that stays."""
        parameter = self.parameters[name]
        if not _trainable(parameter):
            return 0
        master = parameter.dtype in HALVES and name not in self.masters
        states = 0 if name in self.states else len(self.rule.states)
        gradient = self._gradient(name) if parameter.grad is None else 0
        return 4 * parameter.numel() * (master + states) + gradient

    def arrived(self) -> list[tuple[int, int] | None]:
        """Changes with every gradient that comes, or is added to."""
        grads = [parameter.grad for parameter in self.parameters.values()]
        return [None if grad is None else (id(grad), grad._version) for grad in grads]

    def regroup(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """The optimizer's groups as they are now."""
        grouped = {id(p) for group in groups for p in group["params"]}
        self._grouped = {name for name, p in self.parameters.items() if id(p) in grouped}

    def squares(self) -> dict[str, float]:
        """The sum of squares of each gradient that is there."""
        return {
            name: float(self.kernels_of(name).sum_of_squares(_laid(p.grad, p)))
            for name, p in self.parameters.items()
            if p.grad is not None and name in self._grouped
        }

    def nonfinite(self) -> list[str]:
        return [name for name, total in self.squares().items() if not math.isfinite(total)]

    def apply(self, groups: Sequence[Mapping[str, Any]], scale: float) -> None:
        group_of = {id(p): group for group in groups for p in group["params"]}
        for name, parameter in self.parameters.items():
            group = group_of.get(id(parameter))
            if parameter.grad is None or group is None or not parameter.numel():
                continue
            self.open_states(name)
            self.master_of(name)
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

    def master_of(self, name: str) -> torch.Tensor | None:
        """With what the user has written in place; where there is none, for the parameter was frozen, it gets one."""
        parameter, master = self.parameters[name], self.masters.get(name)
        flat = dense(parameter.detach())
        if master is None and parameter.dtype in HALVES and _trainable(parameter):
            self.masters[name] = flat.float()
        elif master is not None:  # a write through `.data` is counted nowhere
            follow(flat, master, self.kernels_of(name))
        return self.masters.get(name)

    def write(self, name: str, value: torch.Tensor) -> None:
        """A new value, rounded as an update's is."""
        parameter, master = self.parameters[name].detach(), self.masters.get(name)
        if master is None:
            parameter.copy_(value)
            return
        laid = torch.empty_strided(parameter.shape, parameter.stride(), device="cpu")
        master.copy_(dense(laid.copy_(value)))
        self.kernels_of(name).split(master, dense(parameter), master)

    def discard(self) -> None:
        """Forgets the gradients that an update would have applied."""
        for name in self._grouped:
            self.parameters[name].grad = None


def _trainable(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.numel() > 0


def _laid(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return laid_like(gradient, tuple(parameter.shape), parameter.stride(), parameter.dtype)
