"""The least that an iteration must move, in closed form: what plans are held against.

Note [least traffic]: optimizer state that is not on the device costs its gradients down and its parameters up.
What is updated on the device has its newest value there: in every moment its parameters, and the gradients
that wait for the update, are there or come back. Of the rest, so are the parameters that were used before
a moment and will be after it. Chunks are taken as divisible, and which of them share a moment as the most favourable,
so no plan can move less.
"""

from __future__ import annotations

from ebbtide.plan.shape import ModelShape, Settings
from ebbtide.record import Record

STEPS = 1000
"""Shares of the optimizer state on the device that are tried."""


def least_traffic(shape: ModelShape, record: Record, settings: Settings) -> int:
    """Bytes over both links of the host in one update, at least."""
    total = sum(shape.state_bytes)
    if not total or not record.moments:
        return 0
    trained = [i for i, count in enumerate(shape.state_bytes) if count]
    away = sum(shape.parameter_bytes[i] + shape.gradient_bytes[i] for i in trained)
    rooms = [settings.device - moment.peak for moment in record.moments]
    crossing = _crossing(shape, record)
    waiting = [0] * len(rooms) if settings.in_backward or settings.take_over else _waiting(shape, record)
    held_in_all = max(waiting)
    moments = list(zip(rooms, crossing, waiting, strict=True))

    def moved(state: float) -> float:
        share = state / total
        params, grads = share * sum(shape.parameter_bytes[i] for i in trained), (1 - share) * held_in_all
        again = 0.0
        for room, across, held in moments:
            needed = state + params + max(0.0, held - grads) + max(0.0, across - params)
            again = max(again, needed - room)
        return (1 - share) * away + settings.accumulate * again

    if settings.placement != "auto":
        return round(moved(0))
    return round(min(moved(total * step / STEPS) for step in range(STEPS + 1)))


def _waiting(shape: ModelShape, record: Record) -> list[int]:
    """By moment: bytes of gradients that have arrived and wait for the update, were all state on the device."""
    arrived: set[int] = set()
    by_moment: dict[int, set[int]] = {}
    for arrival in record.arrivals:
        by_moment.setdefault(arrival.moment, set()).add(shape.parameter_chunk[arrival.parameter])
    waiting = []
    for moment in range(len(record.moments)):
        arrived |= by_moment.get(moment, set())
        waiting.append(sum(shape.gradient_bytes[i] for i in arrived))
    return waiting


def _crossing(shape: ModelShape, record: Record) -> list[int]:
    """By moment: bytes of parameter chunks that were used before it and will be used at or after it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for access in record.accesses:
        for chunk in shape.run_chunks[access.run]:
            first[chunk] = min(first.get(chunk, access.first), access.first)
            last[chunk] = max(last.get(chunk, access.first), access.first)
    change = [0] * (len(record.moments) + 1)
    for chunk, begin in first.items():
        if begin < last[chunk]:
            change[begin + 1] += shape.parameter_bytes[chunk]
            change[last[chunk]] -= shape.parameter_bytes[chunk]
    across: list[int] = []
    alive = 0
    for delta in change[:-1]:
        alive += delta
        across.append(alive)
    return across
