"""On small cases the planner is held against everything: all homes, all orders of eviction, early and on demand."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from ebbtide.forecasting.simulation.outlook import Question, fits, job_of, look
from ebbtide.forecasting.simulation.strategies import STRATEGIES
from ebbtide.forecasting.simulation.walk import least_seconds, step_seconds
from ebbtide.planner import retention
from ebbtide.planner.eviction_choice import Candidate
from ebbtide.planner.plans import draft
from ebbtide.planner.record import FORWARD
from test_simulate import MACHINE, small_question

CASES = 40
MOST = 400
"""Orders of eviction that are tried for each choice of homes."""


class Oracle:
    """Chooses what to evict by a list of numbers, and remembers how many choices there were."""

    def __init__(self, digits: Sequence[int]) -> None:
        self.digits = list(digits)
        self.options: list[int] = []

    def choose(self, policy: str, candidates: Iterable[Candidate], needed: int) -> list[Candidate]:
        left, chosen = sorted(candidates, key=lambda one: one.key), []
        while left and needed > sum(one.nbytes for one in chosen):
            place = len(self.options)
            digit = self.digits[place] if place < len(self.digits) else 0
            self.options.append(len(left))
            chosen.append(left.pop(digit % len(left)))
        return chosen


def oracles() -> Iterator[Oracle]:
    """All sequences of choices, the last one varied first."""
    digits: list[int] = []
    while True:
        oracle = Oracle(digits)
        yield oracle
        digits = oracle.digits[: len(oracle.options)] + [0] * (len(oracle.options) - len(oracle.digits))
        while digits and digits[-1] + 1 >= oracle.options[len(digits) - 1]:
            digits.pop()
        if not digits:
            return
        digits[-1] += 1


def brute_force(question: Question, patch: pytest.MonkeyPatch) -> float:
    """The shortest step of all."""
    setup = STRATEGIES["ebbtide"](question.ask)
    best = float("inf")
    chunks = range(setup.shape.chunks)
    for count, early in itertools.product(range(len(chunks) + 1), (True, False)):
        settings = replace(setup.settings, prefetch=early)
        for homes in itertools.combinations(chunks, count):
            for oracle in itertools.islice(oracles(), MOST):
                with patch.context() as patched:
                    patched.setattr(retention, "choose", oracle.choose)
                    made = draft(setup.shape, question.record, settings, frozenset(homes))
                if made is None:
                    break
                if not any(made.short):
                    job = job_of(question, replace(setup, settings=settings), made.plan())
                    best = min(best, step_seconds(job))
    return best


def small_case(rng: random.Random) -> Question:
    layers = rng.randint(2, 4)
    elements = 1024 * rng.randint(1000, 20_000)
    tide = rng.choice([0, rng.randint(0, 100_000_000)])
    total = 14 * layers * elements
    device = tide + 10_000 + 4 * elements + rng.randint(10, 90) * total // 100
    machine = MACHINE.with_devices(1)
    machine = replace(
        machine,
        device=replace(machine.device, memory=device),
        host=replace(machine.host, memory=2 * total),
        links=replace(machine.links, host_device=rng.uniform(2e9, 30e9)),
    )
    flops = rng.randint(1, 20) * 10**9
    return small_question(
        layers, elements, tide, flops, machine, rng.choice([{}, {"updates": "in-backward"}])
    )


@pytest.mark.parametrize("cases", [CASES // 6, pytest.param(CASES, marks=pytest.mark.heavy)])
def test_schedules_are_near_the_best_there_is(cases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    ratios = []
    while len(ratios) < cases:
        question = small_case(rng)
        found = look(question)
        if found.step_seconds is not None:
            ratios.append(found.step_seconds / brute_force(question, monkeypatch))
    assert (
        min(ratios) >= 1 - 1e-9 or statistics.median(ratios) <= 1.05
    )  # the ladder may find what one budget cannot
    assert statistics.median(ratios) <= 1.05, sorted(ratios)
    assert max(ratios) <= 1.25, sorted(ratios)


def test_whether_something_fits_is_known_without_its_plan() -> None:
    rng = random.Random(2)
    answers = set()
    for _ in range(120):
        question = small_case(rng)
        machine = question.ask.machine
        # Down to what holds no chunk in use.
        memory = int(machine.device.memory * rng.choice([1, 0.5, 0.2, 0.05]))
        machine = replace(
            machine,
            device=replace(machine.device, memory=memory),
            host=replace(machine.host, memory=int(machine.host.memory * rng.choice([1, 0.5, 0.3]))),
        ).with_devices(rng.choice([1, 2, 4]))
        question = replace(question, ask=replace(question.ask, machine=machine))
        found = fits(question)
        answers.add(found)
        assert found == look(question, quick=True).fits
    assert answers == {True, False}


def test_no_step_is_shorter_than_what_is_known_before_it_is_walked() -> None:
    rng = random.Random(3)
    said = 0
    for _ in range(60):
        question = small_case(rng)
        record = question.record
        forward = max(place for place, moment in enumerate(record.moments) if moment.phase == FORWARD)
        question = replace(question, record=replace(record, forward=forward))
        setup = STRATEGIES["ebbtide"](question.ask)
        for count in range(setup.shape.chunks + 1):
            made = draft(setup.shape, question.record, setup.settings, frozenset(range(count)))
            if made is not None and not any(made.short):
                job = job_of(question, setup, made.plan())
                least = least_seconds(job)
                said += least > 0
                assert least <= step_seconds(job) * (1 + 1e-9)
    assert said
