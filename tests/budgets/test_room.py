"""Who leaves the device when room is needed."""

from __future__ import annotations

import pytest
import torch

import ebbtide
import zoo
from ebbtide.errors import BudgetError
from harness import batch_of, config_of


@pytest.mark.parametrize("eviction", ["farthest-next-use", "lru", "list-order"])
def test_what_a_moment_is_to_use_is_the_last_to_make_room_for_it(eviction: str) -> None:
    """When a moment is entered and its level rises, its own chunks are there already, and not yet in use."""
    engine = ebbtide.initialize(
        zoo.build("gpt2"),
        config_of(eviction=eviction, placement="host", device={"memory": 2_000_000}, prefetch=False),
    )
    session, seen = engine._session, 0
    room, cursor = session.room, session.cursor
    tick = session.executor._tick

    def entered(what: int) -> None:
        nonlocal seen
        tick(what)
        unused = [chunk for chunk in room._unused() if chunk.move is None]
        now = [chunk for chunk in unused if cursor.used_now(chunk)]
        others = sum(chunk.nbytes for chunk in unused) - sum(chunk.nbytes for chunk in now)
        if now and others:
            seen += 1
            everything = others + sum(chunk.nbytes for chunk in now)
            assert not set(now) & set(room._victims(everything, sparing=True))
            assert set(room._victims(everything, sparing=False)) == set(unused)

    session.executor._tick = entered
    for number in range(3):
        engine.backward(engine(**batch_of("gpt2", number, torch.bfloat16, "cpu")).loss)
        engine.step()
    assert seen > 10 and not engine.stats()["diverged"]
    engine.close()


@pytest.mark.parametrize("eviction", ["farthest-next-use", "lru", "list-order"])
def test_what_was_fetched_for_nothing_leaves_before_what_a_moment_is_to_use(eviction: str) -> None:
    """As where a step was skipped: what was to be gathered anew is there, and its slice was fetched all the same."""
    engine = ebbtide.initialize(
        zoo.build("gpt2"), config_of(eviction=eviction, placement="host", device={"memory": 2_000_000})
    )
    for number in range(2):
        engine.backward(engine(**batch_of("gpt2", number, torch.bfloat16, "cpu")).loss)
        engine.step()
    session = engine._session
    room, cursor, store, ledger = session.room, session.cursor, session.store, session.room.ledger
    assert cursor.on_track
    parameters = [chunk for chunk in store.chunks.values() if chunk.kind == "param"]
    room.claims.set_level(0)
    tried = 0
    for wanted, other in zip(parameters, parameters[::-1], strict=True):
        if wanted is other or wanted.nbytes != other.nbytes:
            continue
        for chunk in parameters:
            if chunk.device is not None:
                room.evict(chunk)
                store.settle(chunk)
        cursor.position = cursor.plan.firsts["param", wanted.index][0]
        if cursor.used_now(other):
            continue
        store.fetch(wanted)
        store.settle(wanted)
        store.fetch(other)
        room.make("device", ledger.room("device") + wanted.nbytes)
        assert wanted.device is not None and other.device is None
        tried += 1
    assert tried > 2
    engine.close()


def test_losses_that_a_loop_still_holds_cost_nothing_at_the_least_budget() -> None:
    """Each moment has room for a few; for eight bytes more a chunk would leave, and have to come back."""
    least = []
    for holds in (False, True):
        engine = ebbtide.initialize(zoo.build("gpt2"), config_of(device={"memory": 1_000_000}, accumulate=3))
        while True:  # takes the advice until three steps are done
            held: list[torch.Tensor] = []
            try:
                for number in range(9):
                    loss = engine(**batch_of("gpt2", number, torch.bfloat16, "cpu")).loss
                    engine.backward(loss)
                    engine.step()
                    if holds:
                        held.append(loss)
            except BudgetError as error:
                more = engine.config.device.memory + error.short
                engine.close()
                engine = ebbtide.initialize(
                    zoo.build("gpt2"), config_of(device={"memory": more}, accumulate=3)
                )
                continue
            break
        assert engine._session.room.claims.outputs == 0
        least.append(engine.config.device.memory)
        engine.close()
    assert least[0] == least[1]
