"""What training a model on a machine will be like: whether it fits, where the bytes are, how long a step is, what
holds it back.

The planner that the engine runs makes the plan; the plan is walked and simulated on the machine's rates, and held
against what any plan would have to do. Nothing here knows a device, a clock or torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ebbtide.errors import BudgetError
from ebbtide.forecasting.simulation.bound import Must, resource_bound
from ebbtide.forecasting.simulation.pace import pace
from ebbtide.forecasting.simulation.rates import COMPUTE, LANES, READ, WRITE, Rates, StepJob
from ebbtide.forecasting.simulation.simulator import SimulatedRun, simulate
from ebbtide.forecasting.simulation.strategies import Ask, Setup, check_warm_up, set_up
from ebbtide.forecasting.simulation.walk import Walked, least_seconds, step_seconds, walk
from ebbtide.planner.activation_trips import OFF, send_away
from ebbtide.planner.host_side import waiting_gradients
from ebbtide.planner.offloaded_plan import plan_afloat
from ebbtide.planner.placement import has_plan, hopeless
from ebbtide.planner.plans import Plan
from ebbtide.planner.record import Record
from ebbtide.planner.sizes import days_left

NOTHING = 1e-9
"""Seconds too short to speak of."""
SURELY = 1.001
"""A plan that takes longer than the best by this factor, at least, need not be simulated."""
STRIP = 400
"""Pieces that a step's timeline is drawn in."""


@dataclass(frozen=True)
class Question:
    """A model's iteration on a machine."""

    ask: Ask
    record: Record
    tokens: int
    """That a device's batch trains."""
    exchanges: Mapping[int, int] = field(default_factory=dict)
    strategy: str = "ebbtide"
    offload: str = OFF
    """Which activations leave the device between forward and backward; the record says what forward saves."""
    params: int = 0
    """Of the whole model, where a rank holds a share of it; 0: as traced."""

    def lightest(self) -> Record:
        """With all of them away that could be."""
        return self.record if self.offload == OFF else send_away(self.record, self.offload, 1.0, 0.0)[0]


@dataclass(frozen=True)
class Short:
    tier: str
    bytes: int
    message: str


@dataclass(frozen=True)
class Stall:
    cause: str
    seconds: float
    moment: int
    """At which most of it was lost."""


@dataclass(frozen=True)
class Outlook:
    """The answer to a question."""

    strategy: str
    fits: bool
    params: int
    devices: int
    chunk_size: int
    utilisation: float
    margin_chunks: int
    short: Short | None = None
    bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By tier and tag, on one device and in one rank's share of host and SSD; the device's at its fullest moment."""
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    """A step, by link, of one device."""
    ssd_written: int = 0
    """A step, by all devices of a node."""
    endurance_days: float | None = None
    """Until the node's disks have written what they may; None where that is not known, or nothing is written."""
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    """Of all devices."""
    tflops_per_device: float | None = None
    bound_seconds: float | None = None
    achieved_over_bound: float | None = None
    must_seconds: Mapping[str, float] = field(default_factory=dict)
    bottleneck: str | None = None
    """What the step waits for most, beside computing; the busiest resource where it waits for nothing."""
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    critical_seconds: Mapping[str, float] = field(default_factory=dict)
    """By cause: the chain of tasks that decides how long the step is."""
    stalls: tuple[Stall, ...] = ()
    staleness: int | None = None
    """Passes that an update is behind, where updates are lock-free."""
    exchange_in_slices: bool = False
    """Ranks exchange a slice of a chunk's gradients at a time, for whole chunks leave the device no plan."""
    timeline: Mapping[str, tuple[tuple[float, float, str], ...]] = field(default_factory=dict)
    """By lane: when its tasks ran in one step (start, end, cause)."""
    starts: Mapping[int, float] = field(default_factory=dict, repr=False)
    """By moment of the plan: when the device came to it, in that step."""
    plan: Plan | None = field(default=None, repr=False)


def look(
    question: Question, quick: bool = False, plan: Plan | None = None, in_slices: bool = False
) -> Outlook:
    """`quick`: only the plan that moves least is simulated; whether it fits is the same. `plan`: that one; `in_slices`:
    it was made for gradients that are exchanged so."""
    setup = set_up(question.strategy, question.ask)
    setup = (setup.sliced() if in_slices else None) or setup
    lightest = question.lightest()
    base = Outlook(
        question.strategy,
        False,
        question.params or question.ask.model.elements,
        question.ask.ranks,
        setup.chunk_size,
        setup.layout.utilisation,
        _margin_chunks(setup, lightest),
    )
    try:
        check_warm_up(setup)
        if plan is None:
            setup, plan = _planned(question, setup, quick)
    except BudgetError as error:
        return replace(base, short=Short(error.tier, error.short, str(error)))
    return _answer(question, setup, plan, lightest, base)


def _planned(question: Question, setup: Setup, quick: bool) -> tuple[Setup, Plan]:
    """Where there is no plan beside exchanges of whole chunks, ranks exchange slices, as the engine's do."""
    sliced = setup.sliced()
    if sliced is not None and hopeless(setup.shape, question.record, setup.settings):
        return _planned(question, sliced, quick)

    best = math.inf

    def seconds(plan: Plan) -> float:
        nonlocal best
        job = job_of(question, setup, plan)
        # With activations away the best of each choice is asked for, not the best of all.
        least = least_seconds(job) if question.offload == OFF else 0.0
        if least > SURELY * best:
            return least
        found = step_seconds(job)
        best = min(best, found)
        return found

    cost = None if quick else seconds
    try:
        return setup, plan_afloat(setup.shape, question.record, setup.settings, question.offload, cost)
    except BudgetError:
        if sliced is None:
            raise
    return _planned(question, sliced, quick)


def fits(question: Question) -> bool:
    """As `look` says, and sooner: any plan will do."""
    if question.offload != OFF:
        return look(question, quick=True).fits
    setup = set_up(question.strategy, question.ask)
    try:
        check_warm_up(setup)
    except BudgetError:
        return False
    sliced = setup.sliced()
    return any(
        has_plan(one.shape, question.record, one.settings) for one in (setup, sliced) if one is not None
    )


def job_of(question: Question, setup: Setup, plan: Plan) -> StepJob:
    return StepJob(
        setup.shape,
        plan,
        setup.settings,
        Rates(question.ask.machine),
        setup.update_bytes,
        setup.captured,
        setup.blocking,
        setup.all_reduce,
        setup.lock_free,
        question.exchanges,
        question.ask.config.clip is not None,
        question.ask.config.max_staleness,
        question.ask.ranks if setup.in_slices else 1,
    )


def _answer(question: Question, setup: Setup, plan: Plan, lightest: Record, base: Outlook) -> Outlook:
    job = job_of(question, setup, plan)
    rates = job.rates
    walked = walk(job)
    run = simulate(walked.tasks)
    begin, end = run.ends[walked.last[-2]], run.ends[walked.last[-1]]
    behind = question.ask.config.max_staleness if setup.lock_free else 1
    must = resource_bound(setup.shape, lightest, setup.settings, rates, setup.update_bytes, behind)
    moved = walked.moved()
    paced = pace(job, end - begin, moved)
    step, staleness = paced.step, paced.staleness if setup.lock_free else None
    moved[READ] += paced.read
    moved[WRITE] += paced.written
    stalls = _stalls(walked, run)
    machine = rates.machine
    written = moved[WRITE] * min(machine.devices_per_node, machine.devices)
    flops = question.record.flops * plan.accumulate
    tokens = question.tokens * question.ask.ranks * plan.accumulate
    return replace(
        base,
        fits=True,
        exchange_in_slices=setup.in_slices,
        bytes=_bytes(setup, plan, walked),
        moved_bytes=moved,
        ssd_written=written,
        endurance_days=days_left(machine.ssd.endurance, written, step),
        step_seconds=step,
        tokens_per_second=tokens / step,
        tflops_per_device=flops / step / 1e12,
        bound_seconds=must.bound,
        achieved_over_bound=must.bound / step,
        must_seconds=must.seconds,
        bottleneck=_bottleneck(stalls, must, step),
        busy_seconds=_busy(walked),
        critical_seconds=_blame(run, walked.last[-1], begin, end),
        stalls=stalls,
        staleness=staleness,
        timeline=_timeline(walked, run, begin, end),
        starts=_starts(walked, run, begin),
        plan=plan,
    )


def _margin_chunks(setup: Setup, record: Record) -> int:
    """Chunks of optimizer state that fit beside the highest tide and all parameters; negative: parameter chunks that
    do not fit."""
    shape = setup.shape
    states = [count for count in shape.state_bytes if count]
    if not states:
        return 0
    room = setup.settings.device - record.peak - sum(shape.parameter_bytes)
    each = sum(states) / len(states) if room >= 0 else sum(shape.parameter_bytes) / shape.chunks
    return min(int(room // each), len(states))


def _bytes(setup: Setup, plan: Plan, walked: Walked) -> dict[str, dict[str, int]]:
    shape = setup.shape
    homes = plan.homes
    states = {
        home: sum(count for count, where in zip(shape.state_bytes, homes, strict=True) if where == home)
        for home in ("host", "ssd")
    }
    away = [i for i, home in enumerate(homes) if home != "device" and shape.state_bytes[i]]
    kept = range(shape.chunks) if plan.host.keep else away
    params = sum(shape.parameter_bytes[i] for i in kept if i not in plan.host.ssd_parameters)
    grads = waiting_gradients(shape, away, setup.settings)
    host = {"param": 0 if setup.settings.returned else params, "grad": grads, "state": states["host"]}
    if plan.host.ssd or plan.host.ssd_parameters or setup.settings.lock_free:
        host["buffers"] = max(0, plan.host.host_bytes - sum(host.values()))
    if plan.away is not None and plan.away.trips:
        host["activations"] = plan.away.host_bytes
        host["buffers"] = host.get("buffers", 0) + plan.away.staging
    if setup.settings.ssd_beside_device:
        host = {}
    ssd = {"state": states["ssd"], "param": sum(shape.parameter_bytes[i] for i in plan.host.ssd_parameters)}
    if plan.away is not None and plan.away.on_ssd:
        ssd["activations"] = plan.away.stored_bytes
    if setup.settings.ssd_beside_device:
        for item in plan.residency.evicted:
            kind, _ = plan.items[item]
            ssd[kind] = ssd.get(kind, 0) + shape.sizes[item]
    device = {**walked.peak_tags, "exchange": setup.exchange} if setup.exchange else walked.peak_tags
    return {"device": device, "host": host, "ssd": ssd}


def _busy(walked: Walked) -> dict[str, float]:
    busy: dict[str, float] = {}
    for place in walked.steady:
        task = walked.tasks[place]
        busy[task.cause] = busy.get(task.cause, 0.0) + task.seconds
    return busy


def _stalls(walked: Walked, run: SimulatedRun) -> tuple[Stall, ...]:
    """What the computing lane waited for in the steady step, most first."""
    lost: dict[str, dict[int, float]] = {}

    def wait(until: float, last: int, moment: int) -> None:
        for cause, seconds in _blame(run, last, before, until).items():
            at = lost.setdefault(cause, {})
            at[moment] = at.get(moment, 0.0) + seconds

    before = run.ends[walked.last[-2]]
    for place in walked.steady:
        if walked.tasks[place].lane == COMPUTE:
            wait(run.starts[place], run.waited_for[place], walked.tasks[place].moment)
            before = max(before, run.ends[place])
    wait(run.ends[walked.last[-1]], walked.last[-1], walked.tasks[walked.last[-1]].moment)
    found = [
        Stall(cause, sum(by_moment.values()), max(by_moment, key=lambda m: by_moment[m]))
        for cause, by_moment in lost.items()
    ]
    return tuple(sorted(found, key=lambda stall: -stall.seconds))


def _blame(run: SimulatedRun, last: int, since: float, until: float) -> dict[str, float]:
    """The causes of the chain of tasks that ends with `last` and was waited for between two points of time."""
    causes: dict[str, float] = {}
    while last >= 0 and until - since > NOTHING:
        begin = max(since, run.starts[last])
        if begin < until:
            cause = run.tasks[last].cause
            causes[cause] = causes.get(cause, 0.0) + until - begin
            until = begin
        last = run.waited_for[last]
    return causes


def _bottleneck(stalls: tuple[Stall, ...], must: Must, step: float) -> str:
    if stalls and stalls[0].seconds > 0.02 * step:
        return stalls[0].cause
    return must.bottleneck


def _starts(walked: Walked, run: SimulatedRun, begin: float) -> dict[int, float]:
    found: dict[int, float] = {}
    for place in walked.steady:
        task = walked.tasks[place]
        if task.lane == COMPUTE and task.moment >= 0:
            found.setdefault(task.moment, max(run.starts[place], begin) - begin)
    return found


def _timeline(
    walked: Walked, run: SimulatedRun, begin: float, end: float
) -> dict[str, tuple[tuple[float, float, str], ...]]:
    """The steady step, neighbouring tasks of one cause drawn as one."""
    grain = (end - begin) / STRIP
    lanes: dict[str, list[tuple[float, float, str]]] = {}
    for place in walked.steady:
        task = walked.tasks[place]
        start, stop = max(run.starts[place], begin) - begin, run.ends[place] - begin
        if stop <= start:
            continue
        strip = lanes.setdefault(task.lane, [])
        if strip and strip[-1][2] == task.cause and start - strip[-1][1] < grain:
            strip[-1] = (strip[-1][0], stop, task.cause)
        else:
            strip.append((start, stop, task.cause))
    return {lane: tuple(lanes[lane]) for lane in LANES if lane in lanes}
