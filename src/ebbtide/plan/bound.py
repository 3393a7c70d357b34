"""The least that an iteration must move, in closed form: what plans are held against.

Note [least traffic]: optimizer state that is not on the device costs its gradients down and its parameters up.
State on the device takes room from parameters: across any moment, the parameters that were used before it and
are used after it in the same pass must be there or be fetched again. Chunks are taken as divisible, so
no plan can move less.
"""

from __future__ import annotations

from ebbtide.plan.place import ModelShape, Settings
from ebbtide.record import Record


def least_traffic(shape: ModelShape, record: Record, settings: Settings) -> int:
    """Bytes over both links of the host in one update, at least."""
    total = sum(shape.state_bytes)
    if not total or not record.moments:
        return 0
    trained = [i for i, count in enumerate(shape.state_bytes) if count]
    away = sum(shape.parameter_bytes[i] + shape.gradient_bytes[i] for i in trained)
    rooms = [settings.device - moment.peak for moment in record.moments]
    crossing = _crossing(shape, record)
    most = max(0, min(total, min(rooms)))
    choices = {0, most}
    for room, across in zip(rooms, crossing, strict=True):
        choices.add(min(most, max(0, room - across)))

    def moved(state: int) -> float:
        again = max(max(0, across - (room - state)) for room, across in zip(rooms, crossing, strict=True))
        return (1 - state / total) * away + settings.accumulate * again

    if settings.placement != "auto":
        choices = {0}
    return round(min(moved(state) for state in choices))


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
