"""Whether the books of all chunks agree: copies, what they are marked as, and what is reserved for them."""

from __future__ import annotations

from collections.abc import Iterable

from ebbtide.errors import IntegrityError
from ebbtide.memory.budget import Ledger
from ebbtide.memory.chunk import Chunk
from ebbtide.planner.shape import TIERS


def check_books(chunks: Iterable[Chunk], ledger: Ledger) -> None:
    """Raises unless they do."""
    ledger.check()
    device = 0
    for chunk in chunks:
        device += chunk.nbytes if chunk.device is not None else 0
        _check(chunk)
    tags = ledger.tags["device"]
    if device > ledger.reserved["device"] or device > sum(tags.values()):
        raise IntegrityError(f"device copies hold {device} bytes, reserved are {sum(tags.values())}")


def _check(chunk: Chunk) -> None:
    if any(chunk.valid_on(tier) and getattr(chunk, tier) is None for tier in TIERS):
        raise IntegrityError(f"{chunk} is marked valid on a tier where it has no copy")
    if chunk.move is None and chunk.work is None and not chunk.free:
        stale = [tier for tier in TIERS if getattr(chunk, tier) is not None and not chunk.valid_on(tier)]
        if stale and chunk.kind != "param":
            raise IntegrityError(f"{chunk} keeps a stale copy on {stale}")
    if chunk.pins and chunk.device is None:
        raise IntegrityError(f"{chunk} is pinned ({chunk.pins}) but not on the device")
