"""What the planner must know of a model and of the run: bytes by chunk, budgets, what is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ebbtide.planner.sizes import piece_bytes

TIERS = ("device", "host", "ssd")
"""From the warmest to the coldest."""
PARAM, GRAD, WHOLE, WHOLE_GRAD = "param", "grad", "whole", "whole-grad"


def may_leave(alone: bool) -> frozenset[str]:
    """Kinds that leave the device for others' sake: where there is no other tier, what can be gathered again. Gathered
    gradients are sent off whole as soon as they are complete."""
    return frozenset((WHOLE,)) if alone else frozenset((PARAM, GRAD, WHOLE))


@dataclass(frozen=True)
class ModelShape:
    """Which runs and parameters lie in which chunks, and bytes: this rank's slices of them."""

    run_chunks: tuple[tuple[int, ...], ...]
    parameter_chunk: tuple[int, ...]
    parameter_bytes: tuple[int, ...]
    """By chunk."""
    gradient_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    """Master and moments by chunk; 0 where nothing in the chunk is trained."""
    whole_bytes: tuple[int, ...] = ()
    """By chunk: all slices together, where ranks share the chunk and gather it to use it; 0 where a rank has all
    of it. Left out, no chunk is shared."""
    pages: tuple[tuple[int, ...], ...] = ()
    """By chunk: the pages that its copies lie in on the host; left out, they are stored as they are."""
    page_bytes: tuple[int, ...] = ()
    """By chunk: of parameters in a page."""
    expected: tuple[int, ...] = ()
    """By parameter: bytes of its gradient, 0 where it is frozen; left out, that is for chunks as a whole to say."""
    run_parameters: tuple[tuple[int, ...], ...] = ()
    """Left out, nobody computes with parameters whose gradient has come."""

    @property
    def chunks(self) -> int:
        return len(self.parameter_bytes)

    @cached_property
    def shared(self) -> frozenset[int]:
        return frozenset(i for i, count in enumerate(self.whole_bytes) if count)

    @cached_property
    def items(self) -> tuple[tuple[str, int], ...]:
        """What comes to the device and leaves it, in this order: parameters, gradients, and both gathered."""
        kinds = (PARAM, GRAD, WHOLE, WHOLE_GRAD) if self.shared else (PARAM, GRAD)
        return tuple((kind, i) for kind in kinds for i in range(self.chunks))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes by item."""
        whole_grads = [w if g else 0 for w, g in zip(self.whole_bytes, self.gradient_bytes, strict=False)]
        extra = (*self.whole_bytes, *whole_grads) if self.shared else ()
        return (*self.parameter_bytes, *self.gradient_bytes, *extra)

    @cached_property
    def sources(self) -> dict[int, int]:
        """The item that a gathered item is made from."""
        return {2 * self.chunks + i: i for i in self.shared}

    @cached_property
    def piece(self) -> int:
        """Bytes of state that stream from SSD at once."""
        return piece_bytes(sum(self.parameter_bytes))

    @property
    def largest(self) -> int:
        """Bytes of the largest chunk as it is computed with."""
        return max((self.sizes[self.used(i)] for i in range(self.chunks)), default=0)

    def used(self, chunk: int) -> int:
        """The item that must be on the device to compute with a chunk."""
        return 2 * self.chunks + chunk if chunk in self.shared else chunk


@dataclass(frozen=True)
class Settings:
    device: int
    host: int
    placement: str = "auto"
    eviction: str = "farthest-next-use"
    prefetch: bool = True
    accumulate: int = 1
    in_backward: bool = False
    in_parameter_space: bool = False
    """Gradients take the parameter's space (separate master) where one accumulation was seen."""
    ssd: int = 0
    waiting_width: int = 0
    """Updates are lock-free: so many bytes hold a byte of a gradient that waits for one. 0: they are not."""
    max_staleness: int = 1
    """Steps that a lock-free update may take."""
    given: Mapping[str, int] = field(default_factory=dict)
    """By tier, the budget as users set it, where that is not what model data and activations have of it: host modules,
    exchanges between ranks and other engines have a part."""
    sharers: int = 1
    """Processes of a machine among which host and SSD are divided; users set them for all."""
    returned: bool = False
    """Parameters that are static on the device have no copy on the host beside: what is updated there goes back."""
    one_memory: bool = False
    """Device and host are both RAM, of one process that trains alone."""

    @property
    def host_direct(self) -> bool:
        """Gradients whose update is on the host go there as they arrive: where the same threads would make both copies,
        the one into a chunk on the device is one too many. Not where the host overflows to SSD: parameters would have
        to leave it for gradients that are early."""
        return self.one_memory and not (self.set_budget("ssd") or self.lock_free or self.in_parameter_space)

    @property
    def alone(self) -> bool:
        """Nothing can leave the device."""
        return not self.host and not self.ssd

    @property
    def lock_free(self) -> bool:
        return self.waiting_width > 0

    def set_budget(self, tier: str) -> int:
        """As users set it."""
        here: int = getattr(self, tier)
        return self.given.get(tier, self.asked(tier, here))

    def asked(self, tier: str, count: int) -> int:
        """Of what users set, for `count` bytes of it here."""
        return count * (1 if tier == "device" else self.sharers)

    def raised(self, tier: str, count: int) -> int:
        """What users would have to set for `count` bytes more."""
        return self.set_budget(tier) + self.asked(tier, count)

    @property
    def ssd_beside_device(self) -> bool:
        """The device is RAM and there is no other: what is on SSD is updated on the device."""
        return not self.host and self.ssd > 0


def update_bytes(shape: ModelShape, master: str) -> tuple[int, ...]:
    """By chunk: what an update reads and writes. State is read and written, the gradient read, and so is a parameter
    that is half of its master; every parameter is written."""
    read = 0 if master == "separate" else 1
    return tuple(
        2 * state + (grad + (1 + read) * param if state else 0)
        for state, grad, param in zip(
            shape.state_bytes, shape.gradient_bytes, shape.parameter_bytes, strict=True
        )
    )
