"""Updates on a GPU that are put together while it still computes.

Whether gradients are finite, and their norm, the host knows only when the device has come to the end of backward. Where
it has to know, the device waits for it: so whatever of the updates can be done before is done before. Then all of them
are started, or were before where the device decides for itself, and their books are kept while the device is at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ebbtide.kernels import Guarded, Kernels, Operands, Rule
from ebbtide.memory.chunk import Chunk
from ebbtide.run.steps import Segment, Steps


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The update of a chunk, but for its coefficients."""

    members: tuple[int, ...]
    memory: tuple[tuple[Chunk, torch.Tensor], ...]
    """The chunks that it works on, and where they were."""
    segments: tuple[tuple[int, int], ...]
    """(first element, elements) of what is updated alike."""
    operands: tuple[Operands, ...]


def foresee(
    steps: Steps, param: Chunk, states: Sequence[Chunk], source: Chunk, members: Sequence[int]
) -> Foreseen | None:
    """Where all of it is on the device, and quiet. `states`: by kind, the master first where there is one."""
    chunks = (param, *states, source)
    if any(not c.device_valid or c.move is not None or c.worked_on for c in chunks):
        return None
    views = [chunk.view() for chunk in chunks]
    found = [(one.offset, one.count) for one in steps.segments(members, 1.0, ahead=1)]
    operands = []
    for offset, count in found:
        parameter, *state, gradient = [view[offset : offset + count] for view in views]
        master = state.pop(0) if states and states[0].kind == "master" else None
        operands.append(Operands(parameter, gradient, master, tuple(state)))
    memory = tuple((chunk, chunk.device) for chunk in chunks if chunk.device is not None)
    return Foreseen(tuple(members), memory, tuple(found), tuple(operands))


def carry_out(made: Foreseen, segments: Sequence[Segment], kernels: Kernels | Guarded, rule: Rule) -> bool:
    """False, and nothing is done, where something is not as it was foreseen: moved, or grouped anew."""
    moved = any(chunk.device is not there or not chunk.device_valid for chunk, there in made.memory)
    if moved or tuple((one.offset, one.count) for one in segments) != made.segments:
        return False
    kernels.update_all(rule, zip(made.operands, (one.coefficients for one in segments), strict=True))
    return True
