"""What the kernels promise, whoever computes them: operands, forms of a master weight, the interface.

Every implementation gives the same bits for every number. Exempt is only the payload of a NaN in an optimizer
state; parameters, masters and added gradients hold NaN in its canonical form.

Note "forms": parameter and master together hold one fp32 number, in one of four forms. "fp32": the
parameter is the master. "bf16" and "fp16": the parameter is rounded from a separate fp32 master. "split":
the bf16 parameter is the master's high half and an int16 remainder holds the rest; with `high = (bits +
0x8000) >> 16` and `low = bits - (high << 16)` the round trip is exact. bf16 is rounded half up in bits in
both its forms, fp16 to nearest even. NaN is made canonical first: one with all mantissa bits set would
round into a number.

Note "sums": the sum of squares of a tensor is taken in fp64 over blocks of 1,024 elements counted from its
start. Lane l of a block adds elements l, l + 32, ... in that order, then lanes are added by halves (16
apart, 8, 4, 2, 1). The sums of blocks are added in adjacent pairs, an odd last one carried, until one is
left.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsFloat

import torch
from torch import Tensor

from ebbtide.kernels.rule import Rule

BLOCK = 1024
LANES = 32

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FORMS: dict[tuple[torch.dtype, torch.dtype | None], str] = {
    (torch.bfloat16, torch.int16): "split",
    (torch.bfloat16, torch.float32): "bf16",
    (torch.float16, torch.float32): "fp16",
    (torch.float32, None): "fp32",
}


def form_of(parameter: Tensor, master: Tensor | None) -> str:
    """Which form of a master weight these are (Note "forms")."""
    form = FORMS.get((parameter.dtype, None if master is None else master.dtype))
    if form is None:
        found = "no master" if master is None else f"a master of {master.dtype}"
        raise ValueError(
            f"expected bf16 with an int16 remainder, bf16 or fp16 with an fp32 master, or fp32 alone; "
            f"found a parameter of {parameter.dtype} with {found}"
        )
    return form


def require_vectors(*vectors: Tensor | None) -> None:
    """Refuse what are not contiguous vectors of one length on one device."""
    first = vectors[0]
    assert first is not None
    shape, device = first.shape, first.device
    for vector in vectors:
        if vector is not None and (
            vector.shape != shape or vector.device != device or not vector.is_contiguous() or len(shape) != 1
        ):
            found = [f"{tuple(v.shape)} strided {v.stride()} on {v.device}" for v in vectors if v is not None]
            raise ValueError(f"expected contiguous vectors of one length on one device; found {found}")


def require_capture(destination: Tensor, source: Tensor) -> None:
    if destination.shape != source.shape:
        raise ValueError(
            f"expected a gradient of shape {tuple(destination.shape)}, found {tuple(source.shape)}"
        )
    if destination.dtype not in TYPES or not is_dense(destination):
        raise ValueError(
            f"expected dense memory of {', '.join(TYPES.values())} to capture a gradient in; found "
            f"{destination.dtype} of shape {tuple(destination.shape)} and strides {destination.stride()}"
        )


WAITS_IN = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32, torch.float32: torch.float32}
"""By a gradient's dtype: that of a sum of several. In fp16 it would overflow, for loss scales are as large as can be."""


def require_weighed(destination: Tensor, source: Tensor) -> None:
    if WAITS_IN.get(source.dtype) != destination.dtype or destination.shape != source.shape:
        raise ValueError(
            f"expected gradients of {source.shape[0]} elements of {source.dtype} to be added in "
            f"{WAITS_IN.get(source.dtype)}; found {destination.shape[0]} of {destination.dtype}"
        )


def require_ranks(destination: Tensor, received: Tensor) -> int:
    """How many ranks' elements were received."""
    ranks, left = divmod(received.numel(), max(1, destination.numel()))
    if left or not ranks or received.dtype != destination.dtype or destination.dtype not in TYPES:
        raise ValueError(
            f"expected the same elements of each rank, of {destination.dtype}, to add them up to "
            f"{destination.numel()}; found {received.numel()} of {received.dtype}"
        )
    return ranks


def require_numbers(numbers: Tensor) -> None:
    if numbers.dtype != torch.float32:
        raise ValueError(f"expected fp32 numbers, found {numbers.dtype}")


def require_bytes(destination: Tensor, source: Tensor) -> None:
    if destination.dtype != torch.uint8 or source.dtype != torch.uint8:
        raise ValueError(f"expected bytes (uint8), found {source.dtype} to be copied to {destination.dtype}")
    if destination.shape != source.shape:
        raise ValueError(f"expected {destination.numel()} bytes to copy, found {source.numel()}")


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory, each once, in whatever order."""
    return tensor.is_contiguous() or _fill(tensor.shape, tensor.stride())


@functools.lru_cache(4096)
def _fill(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@dataclass(frozen=True, slots=True)
class Operands:
    """What one update reads and writes: vectors of one length.

    `gradient` may be the parameter's own memory, where it has taken over the parameter's space. This needs a
    separate master: the parameter is gone.
    """

    parameter: Tensor
    gradient: Tensor
    master: Tensor | None
    states: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        form = form_of(self.parameter, self.master)
        require_vectors(self.parameter, self.gradient, self.master, *self.states)
        for state in self.states:
            require_numbers(state)
        if self.gradient.dtype not in (self.parameter.dtype, torch.float32):
            raise ValueError(
                f"expected a gradient of {self.parameter.dtype}, as the parameter is, or of fp32; "
                f"found {self.gradient.dtype}"
            )
        if form in ("split", "fp32") and self.gradient.data_ptr() == self.parameter.data_ptr() != 0:
            raise ValueError("the gradient lies in the parameter's space, and there is no separate master")


CLIP_EPS = 1e-6
"""Added to the norm where gradients are clipped, as torch does."""


@dataclass(frozen=True, slots=True)
class Decision:
    norm: float
    """Of the mean gradient, before clipping."""
    factor: float
    """What gradients are multiplied with."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a step's gradients are scaled, by their norm."""

    unscale: float
    clip: float | None

    def decide(self, squares: float) -> Decision:
        """`squares`: the sum of them all, in fp64."""
        norm = math.sqrt(squares) * self.unscale
        share = 1.0 if self.clip is None else min(1.0, self.clip / (norm + CLIP_EPS))
        return Decision(norm, self.unscale * share)


class Guarded(Protocol):
    """Updates that a device scales as it finds the gradients, when it comes to them; what is not finite changes
    nothing."""

    def update_all(self, rule: Rule, pieces: Iterable[tuple[Operands, Sequence[float]]]) -> None:
        """As `Kernels.update_all`, but for the scale, which is not known yet."""

    def decision(self) -> Decision | None:
        """None where something was not finite. Waits until the device knows, and for nothing that it was given later."""


class Kernels(Protocol):
    """The operations that may run on any device without changing a number."""

    def update(self, rule: Rule, operands: Operands, coefficients: Sequence[float]) -> None:
        """One optimizer step, in place."""

    def update_all(self, rule: Rule, pieces: Iterable[tuple[Operands, Sequence[float]]]) -> None:
        """Those of several, which have no element in common; begun while the next are still being listed."""

    def guarded(
        self,
        rule: Rule,
        sums: Sequence[SupportsFloat],
        losses: Sequence[Tensor],
        scaling: Scaling,
    ) -> Guarded | None:
        """Updates with gradients of these sums of squares, in this order, and these losses. None where the host knows it
        all as soon as the device does, or has to look at some."""

    def capture(self, destination: Tensor, source: Tensor, add: bool) -> SupportsFloat:
        """Copy or add a gradient; returns the sum of squares of the result, in memory order.

        It is finite exactly if every element is. On a GPU, reading it waits for the device.
        """

    def weigh(self, destination: Tensor, source: Tensor, weight: float, add: bool) -> None:
        """Copy or add a weighted gradient, for one that waits for an update; fp16 waits in fp32."""

    def sum_of_squares(self, flat: Tensor) -> SupportsFloat:
        """The same sum, of what is there already."""

    def read(self, sums: Sequence[SupportsFloat]) -> list[float]:
        """The numbers behind such sums, all in one go."""

    def block_sums(self, flat: Tensor) -> Tensor:
        """The sums of its blocks, in fp64, where the vector begins on a block's border (Note "sums")."""

    def pairwise(self, sums: Tensor) -> SupportsFloat:
        """What a tensor's blocks add up to; the sums are used up."""

    def sum_ranks(self, destination: Tensor, received: Tensor, scale: float) -> None:
        """What ranks sent of the same elements, one after the other: added in their order in fp32, scaled, rounded once
        to nearest even, NaN made canonical."""

    def look(self, flats: Sequence[Tensor], norm: bool) -> Sequence[SupportsFloat]:
        """The sum of squares of each vector; where no `norm` is wanted, a number that is finite exactly if
        that is."""

    def split(self, master32: Tensor, parameter: Tensor, master: Tensor | None) -> None:
        """Store fp32 numbers as parameter and master; without a master only the parameter, rounded."""

    def join(self, parameter: Tensor, master: Tensor | None, out: Tensor | None = None) -> Tensor:
        """The fp32 numbers that parameter and master hold, in `out` where that is given."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Copy bytes (uint8 vectors). Other Python threads run meanwhile."""
