"""How many files a steady training step enters: a reader who follows one must open as many."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import ebbtide
import harness
import reference
import zoo

HOME = str(Path(ebbtide.__file__).parent) + "/"
MOST = 56
"""68 on the day on which this was first counted. It may fall; what adds a file to the usual step says why: the 56th is
`memory/journal.py`, which is asked whether anything is to be written down."""


@contextmanager
def counting() -> Iterator[Callable[[], AbstractContextManager[set[str]]]]:
    """Gives what is put around a step and has the files that it enters, also on threads that started since."""
    found: set[str] = set()
    watching = False

    def profile(frame, what, arg):
        name = frame.f_code.co_filename
        if watching and what == "call" and name.startswith(HOME):
            found.add(name[len(HOME) :])

    @contextmanager
    def steady():
        nonlocal watching
        watching = True
        sys.setprofile(profile)
        try:
            yield found
        finally:
            watching = False
            sys.setprofile(None)

    threading.setprofile(profile)
    try:
        yield steady
    finally:
        threading.setprofile(None)


def test_a_steady_step_under_a_budget_enters_few_files():
    with counting() as steady:
        engine = ebbtide.initialize(zoo.build("gpt2"), harness.config_of(device={"memory": "half"}, clip=1.0))
        for step in range(4):
            _step(engine, step)
        with steady() as found:
            _step(engine, 4)
        assert engine.stats()["moved_bytes"]["host_to_device"]
        engine.close()
    assert "runtime/movement/executor.py" in found, "nothing was counted"
    assert len(found) <= MOST, f"{len(found)} files: {', '.join(sorted(found))}"


def _step(engine, step):
    loss = engine(**harness.batch_of("gpt2", step, reference.ROUND["bf16"], "cpu")).loss
    engine.backward(loss)
    engine.step()
