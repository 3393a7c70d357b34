"""Gradients that nobody was told of: in a backward pass that is not followed, autograd itself adds them up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ebbtide.runtime.gradients.sink import GradientSink


class AutogradSums:
    def __init__(self, sink: GradientSink, capture: Callable[[int], None]) -> None:
        """`capture`: takes the gradient that is in `.grad`."""
        self._sink, self._capture = sink, capture
        self._kept, self._data = sink.in_place, sink.data
        self._handed_out: dict[int, tuple[torch.Tensor, int]] = {}
        """By parameter: what autograd adds to, and its version before."""

    def hand_out(self) -> None:
        """Before the pass: autograd adds to what is kept, or to what the user has put there."""
        self._handed_out = {}
        self._sink.captured += 1
        for member, parameter in enumerate(self._data.parameters):
            held = parameter.grad
            if held is None and member in self._kept and not self._kept[member].is_inference():
                held = parameter.grad = self._kept[member]
            if held is not None:
                self._handed_out[member] = held, _version(held)

    def take_in(self) -> set[int]:
        """After it: what has arrived, all in one go; of which parameters."""
        handed, self._handed_out = self._handed_out, {}
        every = range(len(self._data.parameters))
        came = {m for m in every if self._came(m, *handed.get(m, (None, 0)))}
        self._sink.captured -= 1
        return came

    def _came(self, member: int, held: torch.Tensor | None, version: int) -> bool:
        """Takes the gradient in that has arrived, if one has. `held`: what autograd was given to add to."""
        sink, parameter = self._sink, self._data.parameters[member]
        gradient = parameter.grad
        ours = held is not None and member in self._kept and held is self._kept[member]
        in_place = gradient is held
        if in_place and ours:
            parameter.grad = None
        if gradient is None or (in_place and _version(gradient) == version):
            return False
        if in_place and ours:
            sink.captured += 1
            sink.arrived[member] += 1
            sink.squares[member] = None
            return True
        if ours:  # added out of place: it is the sum
            self._kept.drop(member)
            sink.arrived[member] = 0
        self._capture(member)
        return ours or sink.is_trained(member)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
