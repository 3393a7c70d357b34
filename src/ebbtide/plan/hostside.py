"""What the host holds of what the device does not, and what goes to SSD because the host is too small.

Parameters and gradients of chunks that the host updates come first: they cross the link in every iteration. Then
optimizer state, in the model's order, for the last chunks' gradients come first and their state can be read while
backward goes on. What is left is streamed from SSD and back. Only where the gradients and the rest leave no room for
parameters do these go to SSD, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ebbtide.plan.shape import ModelShape, Settings
from ebbtide.plan.stage import lock_free_bytes, stage_bytes, stored_bytes

TRANSIT = 2
"""Of the largest chunk's parameters: room on the host for those that pass through it."""


@dataclass(frozen=True)
class HostSide:
    keep: bool
    """Every parameter chunk that comes to the device keeps its host copy."""
    ssd: frozenset[int]
    """Chunks whose optimizer state lives on SSD."""
    ssd_parameters: frozenset[int]
    host_bytes: int
    ssd_bytes: int
    short: int = 0
    """Bytes that fit neither tier."""
    tier: str = "host"
    """The tier that is short."""


def beside_updates(shape: ModelShape, away: Iterable[int], settings: Settings, on_ssd: Iterable[int]) -> int:
    """Bytes of all buffers of updates beside the computation, on the tier where they run. `away`: the chunks that are
    not updated on the device, `on_ssd`: those whose state streams."""
    chunks = [i for i in away if shape.state_bytes[i]]
    parameters = [shape.parameter_bytes[i] for i in chunks]
    gradients = [shape.gradient_bytes[i] for i in chunks]
    found = stage_bytes([shape.state_bytes[i] for i in on_ssd], shape.piece)
    if settings.lock_free:
        found += sum(lock_free_bytes(parameters, gradients, settings.waiting_width))
    return found


def fill_host(shape: ModelShape, device: frozenset[int], settings: Settings) -> HostSide:
    """`device`: the chunks whose optimizer state lives on the device."""
    away = [i for i, count in enumerate(shape.state_bytes) if count and i not in device]
    if settings.ssd_beside_device:
        return _on_ssd(shape, away, settings)
    grads = waiting_gradients(shape, away, settings)
    params = sum(shape.parameter_bytes[i] for i in away)
    if settings.placement == "static":
        params = 0  # they are on the device for good
    states = sum(shape.state_bytes[i] for i in away)
    kept = sum(shape.parameter_bytes) - params if settings.placement != "static" else 0
    needed = grads + params + states + beside_updates(shape, away, settings, ())
    for keep, count in ((True, needed + kept), (False, needed)):
        if count <= settings.host:
            return HostSide(keep, frozenset(), frozenset(), count, 0)
    if not settings.ssd:
        return HostSide(False, frozenset(), frozenset(), settings.host, 0, needed - settings.host)
    return _with_ssd(shape, away, grads, params, settings)


def waiting_gradients(shape: ModelShape, away: Iterable[int], settings: Settings) -> int:
    """Bytes of gradients that wait on the host: all of them for an update after backward, a few for one in backward,
    none where they lie in their parameters' space."""
    if settings.take_over:
        return 0
    sizes = [shape.gradient_bytes[i] for i in away]
    return 2 * max(sizes, default=0) if settings.in_backward else sum(sizes)


def _on_ssd(shape: ModelShape, away: list[int], settings: Settings) -> HostSide:
    """There is no host: all state that is not on the device is on SSD."""
    states = [shape.state_bytes[i] for i in away]
    stored = sum(stored_bytes(count, shape.piece) for count in states)
    short = max(0, stored - settings.ssd)
    return HostSide(False, frozenset(away), frozenset(), 0, sum(states), short, "ssd")


def _with_ssd(shape: ModelShape, away: list[int], grads: int, params: int, settings: Settings) -> HostSide:
    left = settings.host - beside_updates(shape, away, settings, away) - grads - params
    held_params: list[int] = []
    if left < 0:
        left -= TRANSIT * max((shape.parameter_bytes[i] for i in away), default=0)
    for i in reversed(away):
        if left >= 0:
            break
        left += shape.parameter_bytes[i]
        held_params.append(i)
    if left < 0:
        return HostSide(False, frozenset(), frozenset(), settings.host, 0, -left)
    ssd: set[int] = set()
    for i in away:
        if shape.state_bytes[i] <= left:
            left -= shape.state_bytes[i]
        else:
            ssd.add(i)
    streamed = [shape.state_bytes[i] for i in ssd] + [shape.parameter_bytes[i] for i in held_params]
    short = max(0, sum(stored_bytes(count, shape.piece) for count in streamed) - settings.ssd)
    host = settings.host - left
    return HostSide(False, frozenset(ssd), frozenset(held_params), host, sum(streamed), short, "ssd")
