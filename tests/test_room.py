"""Who leaves the device when room is needed."""

from __future__ import annotations

import pytest
import torch

import ebbtide
import zoo
from harness import batch_of, config_of


@pytest.mark.parametrize("eviction", ["farthest-next-use", "lru", "list-order"])
def test_what_a_moment_is_to_use_is_the_last_to_make_room_for_it(eviction: str) -> None:
    """When a moment is entered and its level rises, its own chunks are there already, and not yet in use."""
    engine = ebbtide.initialize(
        zoo.build("gpt2"),
        config_of(eviction=eviction, placement="host", device={"memory": 2_000_000}, prefetch=False),
    )
    session, seen = engine._session, 0
    room, course = session.room, session.course
    tick = session.executor._tick

    def entered(what: int) -> None:
        nonlocal seen
        tick(what)
        unused = [chunk for chunk in room._unused() if chunk.move is None]
        now = [chunk for chunk in unused if course.used_now(chunk)]
        others = sum(chunk.nbytes for chunk in unused) - sum(chunk.nbytes for chunk in now)
        if now and others:
            seen += 1
            assert not set(now) & set(room._victims(others))
            assert set(room._victims(others + 1)) & set(now)

    session.executor._tick = entered
    for number in range(3):
        engine.backward(engine(**batch_of("gpt2", number, torch.bfloat16, "cpu")).loss)
        engine.step()
    assert seen > 10 and not engine.stats()["diverged"]
    engine.close()
