"""Injected faults: a copy that fails leaves its source intact and the books right, and training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ebbtide
import ebbtide.errors
import zoo
from harness import config_of
from sampling import few, some

STEPS = 4


def train(engine: ebbtide.Engine, fail_at: int | None) -> tuple[str, int]:
    """Trains; the copy to the device number `fail_at` raises, and the step that saw it is made again. Counts failures.

    Copies to the host are of gradients: what becomes of an update that lacks one is the next test's.
    """
    backend: Any = engine._tiers.backend
    copy, calls, failures = backend._copy, 0, 0

    def faulty(*arguments: Any) -> None:
        nonlocal calls
        calls += arguments[2] == "host_to_device"
        if calls == fail_at and arguments[2] == "host_to_device":
            raise OSError("injected")
        copy(*arguments)

    backend._copy = faulty
    done = 0
    while done < STEPS:
        try:
            loss = engine(**zoo.ZOO["gpt2"].batch(done)).loss
            engine.backward(loss)
        except OSError:
            failures += 1
            engine.check_integrity()
            engine._session.drop_gradients()
            continue
        engine.step()
        engine.check_integrity()
        done += 1
    return engine.weights_sha256(), failures


@pytest.mark.parametrize("fail_at", some([1, 2, 3, 5, 8, 13, 34], 3))
def test_a_failed_copy_loses_nothing(fail_at: int) -> None:
    config = config_of(device={"memory": 1_400_000}, placement="host")
    shas = []
    for fault in (None, fail_at):
        engine = ebbtide.initialize(zoo.build("gpt2"), config)
        try:
            sha, failures = train(engine, fault)
        finally:
            engine.close()
        shas.append(sha)
        assert failures == (fault is not None)
    assert shas[0] == shas[1]


def test_an_update_that_is_hit_keeps_the_books_right() -> None:
    """Whichever copy fails, in whatever phase: integrity holds, and values can still be read."""
    reached = False
    for fail_at in few(range(1, 200, 2), 30):
        engine = ebbtide.initialize(zoo.build("gpt2"), config_of(device={"memory": 1_400_000}))
        backend: Any = engine._tiers.backend
        copy, calls = backend._copy, 0

        def faulty(*arguments: Any, copy: Any = copy, fail_at: int = fail_at) -> None:
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise OSError("injected")
            copy(*arguments)

        backend._copy = faulty
        try:
            for number in range(2):
                try:
                    engine.backward(engine(**zoo.ZOO["gpt2"].batch(number)).loss)
                    engine.step()
                    engine.weights_sha256()  # waits for the update, which goes on beside
                except OSError:
                    # A step that was hit is marked: the weights are loaded again before training goes on.
                    engine.load_state_dict(engine.state_dict())
                engine.check_integrity()
            reached = calls < fail_at
            backend._copy = copy
            assert not any(value.isnan().any() for value in engine.state_dict().values())
            with torch.no_grad():
                assert torch.isfinite(engine(**zoo.ZOO["gpt2"].batch(9)).loss)
        finally:
            engine.close()
        if reached:
            break
    assert reached and fail_at > 20
