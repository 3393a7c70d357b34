"""The simulator's promises: tasks in order, shared resources, and what a forecast must never say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ebbtide.config import Config
from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.forecasting.simulation.outlook import Question, look
from ebbtide.forecasting.simulation.simulator import Task, simulate
from ebbtide.forecasting.simulation.strategies import Ask, Model
from ebbtide.layout import TensorSpec
from ebbtide.planner.record import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    MATMUL,
    Access,
    Arrival,
    Moment,
    Record,
    Work,
    event,
)


def test_lanes_keep_order_and_tasks_wait_for_others() -> None:
    run = simulate(
        [
            Task("a", 2.0),
            Task("b", 1.0),
            Task("b", 1.0, after=(0,)),
            Task("a", 1.0, after=(1,)),
            Task("a", 0.0),
        ]
    )
    assert run.starts == (0.0, 0.0, 2.0, 2.0, 3.0)
    assert run.ends == (2.0, 1.0, 3.0, 3.0, 3.0)
    assert run.path(2) == [0, 2]


def test_what_is_asked_twice_over_runs_at_half_speed() -> None:
    both = (("cores", 1.0),)
    run = simulate(
        [Task("a", 2.0, shares=both), Task("b", 1.0, shares=both), Task("c", 1.0, shares=(("disk", 1.0),))]
    )
    assert run.ends == (3.0, 2.0, 1.0)  # halved until the second has ended; the third shares nothing


def test_a_task_cannot_wait_for_a_later_one() -> None:
    with pytest.raises(ValueError, match="waits for task 1"):
        simulate([Task("a", 1.0, after=(1,)), Task("a", 1.0)])


MACHINE = Machine.read(
    {
        "name": "test",
        "devices_per_node": 4,
        "device": {"memory": "1GB", "flops": "1T", "bandwidth": "100GB/s", "launch": 0},
        "host": {"memory": "4GB", "cores": 4, "bandwidth": "40GB/s"},
        "ssd": {"memory": "8GB", "read": "3GB/s", "write": "2GB/s", "total": "3GB/s"},
        "links": {"host_device": "10GB/s", "device_device": "50GB/s", "node_node": "20GB/s", "latency": 1e-5},
    }
)


def small_question(
    layers: int, elements: int, tide: int, flops: int, machine: Machine, config: dict[str, object]
) -> Question:
    """A chain of layers of one tensor each: forward, then backward with gradients; the tide is highest between."""
    moments, accesses, arrivals = [], [], []

    def moment(what: int, level: int, work: int) -> None:
        moments.append(Moment(what, tide * level // layers, work=(Work(MATMUL, work, work // 100),)))

    for run in range(layers):
        accesses.append(Access(run, len(moments), len(moments), FORWARD))
        moment(event(FORWARD, run), run + 1, flops)
    for run in reversed(range(layers)):
        accesses.append(Access(run, len(moments), len(moments), BACKWARD))
        moment(event(BACKWARD, run), run + 1, 2 * flops)
        arrivals.append(Arrival(run, len(moments)))
        moment(event(GRADIENT, run), run, flops // 10)
    record = Record("test", tuple(moments), tuple(accesses), tuple(arrivals))
    tensors = tuple(TensorSpec(f"{i}.weight", (elements,), (1,), "bf16") for i in range(layers))
    model = Model(tensors, tuple((i,) for i in range(layers)))
    ask = Ask(model, machine, Config.read({"layout": "tensor", **config}))
    return Question(ask, record, 1000)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    layers = draw(st.integers(1, 7))
    elements = 1024 * draw(st.integers(1, 20_000))
    tide = draw(st.integers(0, 200_000_000))
    flops = draw(st.integers(1, 20)) * 10**9
    total = 16 * layers * elements + tide
    ranks = draw(st.sampled_from([1, 1, 2, 4, 8]))
    machine = MACHINE.with_devices(ranks)
    device = tide + draw(st.integers(2, 20)) * elements + draw(st.integers(0, 110)) * total // 100
    host = draw(st.integers(20, 200)) * total // 100
    machine = replace(
        machine,
        device=replace(machine.device, memory=device + 10_000),
        host=replace(machine.host, memory=host),
        ssd=replace(machine.ssd, memory=draw(st.sampled_from([0, 100 * total]))),
        links=replace(machine.links, host_device=draw(st.floats(1e9, 50e9))),
    )
    config = draw(
        st.sampled_from(
            [{}, {"master": "separate"}, {"accumulate": 2}, {"updates": "in-backward"}, {"prefetch": False}]
        )
    )
    return small_question(layers, elements, tide, flops, machine, config)


def better(machine: Machine, part: str, factor: float) -> Machine:
    section, _, key = part.partition(".")
    value = getattr(getattr(machine, section), key)
    scaled = type(value)(value * factor)
    return replace(machine, **{section: replace(getattr(machine, section), **{key: scaled})})


PARTS = [
    "device.memory", "host.memory", "device.flops", "device.bandwidth", "host.bandwidth", "links.host_device",
    "links.device_device", "links.node_node", "ssd.read", "ssd.total", "ssd.write",
]  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(questions(), st.sampled_from(PARTS), st.floats(1.001, 4.0))
def test_more_of_anything_never_makes_a_step_slower(question: Question, part: str, factor: float) -> None:
    check_more(question, part, factor)


@pytest.mark.heavy
@settings(max_examples=1000, deadline=None)
@given(questions(), st.sampled_from(PARTS), st.floats(1.001, 4.0))
def test_more_of_anything_never_makes_any_step_slower(question: Question, part: str, factor: float) -> None:
    check_more(question, part, factor)


@pytest.mark.parametrize(
    ("layers", "elements", "flops", "device", "host", "ssd", "ranks"),
    [
        (5, 2048, 10**9, 37033, 114688, 0, 1),
        (6, 2107392, 19 * 10**9, 24792929, 147686031, 10**11, 2),
    ],
)
def test_more_host_memory_does_not_bring_a_slower_plan_that_moves_less(
    layers: int, elements: int, flops: int, device: int, host: int, ssd: int, ranks: int
) -> None:
    machine = MACHINE.with_devices(ranks)
    machine = replace(
        machine,
        device=replace(machine.device, memory=device),
        host=replace(machine.host, memory=host),
        ssd=replace(machine.ssd, memory=ssd),
        links=replace(machine.links, host_device=1e9),
    )
    check_more(small_question(layers, elements, 0, flops, machine, {}), "host.memory", 2.0)


def check_more(question: Question, part: str, factor: float) -> None:
    before = look(question)
    machine = better(question.ask.machine, part, factor)
    after = look(replace(question, ask=replace(question.ask, machine=machine)))
    assert after.fits or not before.fits
    # Ranks exchange whole chunks wherever there is a plan beside them, even one that is slower than that beside slices.
    if before.fits and before.exchange_in_slices == after.exchange_in_slices:
        assert before.step_seconds is not None and after.step_seconds is not None
        assert after.step_seconds <= before.step_seconds * (1 + 1e-9), (
            before.step_seconds,
            after.step_seconds,
        )


def test_gradients_of_an_update_in_backward_are_reported_as_the_few_that_wait() -> None:
    machine = MACHINE.with_devices(2)
    machine = replace(
        machine,
        device=replace(machine.device, memory=5_753_042),
        host=replace(machine.host, memory=11_344_281),
        links=replace(machine.links, host_device=1e9),
    )
    question = small_question(6, 590_848, 0, 10**9, machine, {"updates": "in-backward"})
    found = look(question)
    slice_bytes = 2 * 295_936  # half of a tensor, padded to 1,024 elements
    assert found.fits and found.bytes["host"]["grad"] == 2 * slice_bytes
    assert sum(found.bytes["host"].values()) <= question.ask.host


def test_gradients_that_ranks_share_have_space_of_their_own() -> None:
    """They are reduced to slices beside the parameters; those of one process take the parameters' place."""
    waiting = []
    for ranks in (1, 2):
        machine = MACHINE.with_devices(ranks)
        machine = replace(machine, device=replace(machine.device, memory=8_000_000))
        found = look(small_question(6, 590_848, 0, 10**9, machine, {"precision": "fp16"}), quick=True)
        assert found.fits
        waiting.append(found.bytes["host"]["grad"])
    assert waiting == [0, 6 * 2 * 295_936]


def test_a_device_has_room_for_what_ranks_send_each_other() -> None:
    """For a whole chunk's gradients; where that leaves no plan, for one slice, and ranks send in as many rounds as they
    are."""
    machine, whole = MACHINE.with_devices(2), 2 * 2 * 295_936
    seen = []
    for memory in range(2_000_000, 4_000_000, 100_000):
        small = replace(machine, device=replace(machine.device, memory=memory))
        found = look(small_question(6, 590_848, 0, 10**9, small, {}), quick=True)
        kept = found.bytes.get("device", {}).get("exchange", 0)
        assert found.exchange_in_slices == (kept == whole // 2)
        seen.append((found.fits, kept))
    assert list(dict.fromkeys(seen)) == [(False, 0), (True, whole // 2), (True, whole)]
    alone = look(small_question(6, 590_848, 0, 10**9, MACHINE.with_devices(1), {}), quick=True)
    assert "exchange" not in alone.bytes["device"]


@settings(max_examples=25, deadline=None)
@given(questions())
def test_no_step_beats_its_bound_and_no_tier_its_budget(question: Question) -> None:
    check_bounds(question)


@pytest.mark.heavy
@settings(max_examples=1000, deadline=None)
@given(questions())
def test_no_step_at_all_beats_its_bound(question: Question) -> None:
    check_bounds(question)


def check_bounds(question: Question) -> None:
    found = look(question)
    assume(found.fits)
    assert found.step_seconds is not None and found.bound_seconds is not None
    assert found.bound_seconds <= found.step_seconds * (1 + 1e-9)
    ask = question.ask
    for tier, budget in (("device", ask.device), ("host", ask.host), ("ssd", ask.ssd)):
        assert sum(found.bytes[tier].values()) <= budget, tier
    stalled = sum(stall.seconds for stall in found.stalls)
    assert stalled <= found.step_seconds * (1 + 1e-6)
    if found.staleness is None:
        assert sum(found.critical_seconds.values()) == pytest.approx(found.step_seconds)
    assert repr(look(question)) == repr(found)  # nothing is random
