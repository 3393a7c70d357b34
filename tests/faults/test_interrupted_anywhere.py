"""Steps that are interrupted at any call of the engine: the weights are those before the step or after it, and training
goes on with the same numbers; or the engine says that it is broken, and loading mends it."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

import ebbtide
import zoo
from ebbtide.engine import Engine
from ebbtide.errors import StateError
from harness import config_of
from interrupt import Interrupt
from test_interrupts import spilling, step

SPILLING: dict[str, dict[str, Any]] = {
    "host": {},
    "in-backward": {"updates": "in-backward", "clip": None},
    "activations": {"offload_activations": "all"},
}
BEFORE = 3
"""Steps that are not interrupted: traced, by a plan, and by it again."""


def of_engine(path: str) -> bool:
    return "/tracing/" not in path


def opened(setting: str) -> Engine:
    if setting == "resident":
        return ebbtide.initialize(zoo.build("gpt2"), config_of())
    return spilling(**SPILLING[setting])


def sha_of(engine: Engine) -> str:
    engine.synchronize()
    return engine.weights_sha256()


@cache
def undisturbed(setting: str) -> tuple[list[str], int]:
    """The weights' hash after each step, and how many points the one after `BEFORE` has."""
    engine, shas = opened(setting), []
    count = Interrupt(0, of_engine)
    for number in range(BEFORE + 2):
        if number == BEFORE:
            with count:
                step(engine, number)
        else:
            step(engine, number)
        shas.append(sha_of(engine))
    engine.close()
    return shas, count.seen


def interrupted(engine: Engine, at: int) -> Interrupt:
    for number in range(BEFORE):
        step(engine, number)
    engine.synchronize()
    interrupt = Interrupt(at, of_engine)
    try:
        with interrupt:
            step(engine, BEFORE)
    except KeyboardInterrupt:
        pass
    return interrupt


def goes_on(engine: Engine, shas: list[str]) -> None:
    engine.synchronize()
    engine.check_integrity()
    assert sha_of(engine) in shas[BEFORE - 1 : BEFORE + 1], "the weights are of no step"
    if engine._session.micro:
        engine.step()  # it was this that did not end
    elif sha_of(engine) == shas[BEFORE - 1]:
        step(engine, BEFORE)
    assert sha_of(engine) == shas[BEFORE]
    step(engine, BEFORE + 1)
    assert sha_of(engine) == shas[BEFORE + 1]


def is_mended(engine: Engine) -> None:
    with pytest.raises(StateError, match="partially stepped"):
        step(engine, BEFORE)
    engine.load_state_dict(zoo.build("gpt2").state_dict())
    for number in range(2):
        step(engine, number)
    engine.check_integrity()


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("setting", ["resident", *SPILLING])
def test_a_step_is_interrupted_anywhere(setting: str, part: int) -> None:
    shas, count = undisturbed(setting)
    assert count > 5000
    for at in random.sample(range(1, count + 1), 25):
        engine = opened(setting)
        interrupt = interrupted(engine, at)
        try:
            if engine._core.broken or engine._session.queue.failed:
                is_mended(engine)
            else:
                goes_on(engine, shas)
            engine.check_integrity()
        except BaseException as error:
            error.add_note(f"interrupted at {interrupt.place}, point {at} of {count}")
            raise
        finally:
            engine.close()
