"""One model's training machinery, put together: data, executor, updates, traces, interception.

The engine is its face. A session knows passes (forward, backward, update) and how they are traced and
planned; it knows nothing of configs, files or users.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ebbtide.backend import Backend
from ebbtide.backend.elsewhere import not_on_ours
from ebbtide.config import Config
from ebbtide.disk.space import DiskSpace
from ebbtide.intercept import Interceptor, find_units
from ebbtide.kernels import RULES, Kernels
from ebbtide.layout import ALONE, Slicing, build_spread_layout, unit_elements
from ebbtide.memory.chunks import ChunkStore
from ebbtide.memory.ledger import Ledger
from ebbtide.plan.activations import OFF
from ebbtide.plan.shape import ModelShape
from ebbtide.run.activations import Activations
from ebbtide.run.adoption import Adoption
from ebbtide.run.companions import Companions
from ebbtide.run.course import IDLE, RUNNING, UPDATING
from ebbtide.run.dispatch import Dispatcher
from ebbtide.run.executor import Executor
from ebbtide.run.homes import Homes
from ebbtide.run.hosted import HostModules
from ebbtide.run.imagining import Imagining
from ebbtide.run.lockfree import LockFree
from ebbtide.run.mixtures import Layer, find_layers
from ebbtide.run.model import ModelData, specs_of
from ebbtide.run.planning import Planning
from ebbtide.run.ranks import Ranks
from ebbtide.run.recording import Recording
from ebbtide.run.resting import Resting
from ebbtide.run.room import HOSTED, Room
from ebbtide.run.setup import Choice, check_fit
from ebbtide.run.shares import SharedGradients
from ebbtide.run.sharing import Sharing
from ebbtide.run.source import Source
from ebbtide.run.streaming import Streaming
from ebbtide.run.terms import cost_of, settings_of, shape_of
from ebbtide.run.traces import Traces
from ebbtide.run.unfreezing import Unfreezing
from ebbtide.run.unmanaged import Unmanaged
from ebbtide.run.updater import Updater
from ebbtide.run.updates import Updates
from ebbtide.run.wishes import DONE, FORWARD
from ebbtide.run.writes import Writes

MANY = 256
"""Forward passes before one backward: whoever makes more forgot torch.no_grad, and a trace of them all has no use."""


class Session:
    def __init__(
        self,
        module: nn.Module,
        choice: Choice,
        config: Config,
        backend: Backend,
        ledger: Ledger,
        kernels: Mapping[str, Kernels],
        peers: WeakSet[Room],
        source: Source | None = None,
        disk: DiskSpace | None = None,
        ranks: Ranks | None = None,
        companions: Companions | None = None,
    ) -> None:
        """`ranks`: those that share the chunks."""
        self.module, self.config, self.backend, self.ledger = module, config, backend, ledger
        parameters, runs, units = find_units(module, list(choice.managed.values()))
        name_of = {id(p): n for n, p in choice.managed.items()}
        names = [name_of[id(p)] for p in parameters]
        specs = specs_of(names, parameters, [choice.dtypes[n] for n in names])
        size = None if config.chunk_size == "auto" else unit_elements(specs, int(config.chunk_size))
        slicing = ALONE if ranks is None else Slicing(ranks.size, ranks.rank)
        layers, self.gathered_experts = find_layers(module, specs, slicing.ranks, config)
        """Layers whose experts cannot be spread, and why."""
        banks = [layer.bank for layer in layers]
        self.layout = build_spread_layout(specs, banks, config.layout, size, slicing.ranks)
        self.store = ChunkStore(self.layout, backend, ledger, disk, slicing)
        self.data = ModelData(names, parameters, runs, self.layout, self.store, config.resolved_master)
        self.executor = Executor(self.data, config.eviction, Updater(background=config.prefetch))
        self.room, self.places = self.executor.room, self.executor.places
        self.course = self.executor.course
        self.updates = Updates(
            self.data, RULES[config.optimizer.name], kernels, self.executor, config.updates == "in-backward"
        )
        self.updates.companions = companions
        if companions is not None:
            companions.know(names)
        self.updates.stop_nonfinite = config.nonfinite == "stop"
        self.updates.norm_wanted = config.clip is not None or config.precision == "fp16"
        self.updates.add_chunks()
        self.sharing = None if ranks is None else self._share(ranks, kernels["device"])
        self.executor.on_gradient = self.updates.capture
        self.executor.reclaim = self.updates.taken.reclaim
        self.data.carry_on = Writes(self.data, kernels["host"], self.updates.taken).carry_on
        # On a GPU the copy is a thousandth of a step, and the allocator's counters could not tell them apart.
        as_they_are = backend.kind == "cpu" and ranks is None
        self.updates.kept.always = as_they_are and self.ledger.device_alone
        self.updates.kept.where_planned = (
            as_they_are and self.updates.in_backward and self.store.near == "device"
        )
        self.room.peers, self.room.homes = peers, self.updates.homes
        self.streaming = Streaming(self.store, self.executor.updater, self.updates.state_chunks)
        self.data.written_on_ssd = self.streaming.note  # what was read ahead is out of date
        self.lock_free = self._lock_free(config) if config.updates == "lock-free" else None
        self.unmanaged = Unmanaged(module, choice, backend, kernels, RULES[config.optimizer.name])
        self._reserve_hosted(choice)
        self.recording = Recording(backend, self.unmanaged, self.updates.kept)
        spared = 0 if self.sharing is None else self.sharing.reductions.extra()
        check_fit(ledger, config, shape_of(self.data, self.updates), spared)
        self.interceptor = Interceptor(module, parameters, runs, units, self.executor)
        carried = HostModules(choice.hosted.values(), backend.device, self.store.traffic.moved)
        for handle in carried.handles:
            self.interceptor.keep(handle)
        self._plan_by(config)
        self.dispatchers = self._dispatch(layers)
        self.imagining = Imagining(
            module, self.data, self.interceptor, self.unmanaged, self.room.activations is not None
        )
        if companions is not None and companions.split:
            self.imagining.obstacle = (
                "tensor parallelism has split the model: its collectives cannot be imagined"
            )
        elif self.dispatchers:
            self.imagining.obstacle = (
                "experts are spread over ranks: how many tokens come is not known before"
            )
        self.planning = Planning(
            config, self.executor, self.traces, self.homes, self.streaming, self.imagining, self.sharing
        )
        still = self.updates.kept.always and self.planning.roomy and not self.updates.in_backward
        others = companions or self.lock_free or self.room.activations
        self.resting = Resting(self.interceptor, self.updates, ledger, possible=still and others is None)
        self.unfreezing = Unfreezing(self.updates, self.room, self.homes, self.traces, self.sharing)
        self.pieces = 1
        """Of how many losses the gradients are the sum, beside `accumulate`: micro-batches that are one pass."""
        self._forwards = 0
        """Of the pass that is under way."""
        self.micro = 0
        """Backward passes since the last update."""
        weakref.finalize(self.executor, not_on_ours, partial(_release, self.store))
        self.room.begin_turn()
        try:
            with nullcontext() if self.sharing is None else self.sharing.beginning():
                self._adoption(source).take_over(self.shape, choice)
        except BaseException:
            self.undo(source)
            raise
        self.recording.begin()
        peers.add(self.room)

    # -- setting up -----------------------------------------------------------------------------------

    def _lock_free(self, config: Config) -> LockFree:
        made = LockFree(self.updates.chunks, self.executor, config.max_staleness, config.waiting_width)
        self.updates.lock_free = made
        self.executor.beside, self.data.before_values = made.tick, made.drain
        return made

    def _share(self, ranks: Ranks, kernels: Kernels) -> Sharing:
        made = Sharing(self.data, self.places, ranks, kernels, self.updates.in_backward)
        self.places.gather, self.data.collect = made.gather, made.collect
        self.room.end_exchange = made.reductions.finish
        self.updates.shares = SharedGradients(self.updates, self.executor, made)
        made.reductions.reserve()
        return made

    def _dispatch(self, layers: Sequence[Layer]) -> list[Dispatcher]:
        """Layers whose experts ranks have among them send tokens from now on."""
        if self.sharing is None:
            return []
        made = [Dispatcher(i, layer, self.sharing, self.executor.lock) for i, layer in enumerate(layers)]
        for dispatcher in made:
            self.interceptor.keep(dispatcher)
        return made

    @property
    def ranks(self) -> Ranks | None:
        """Those that share the chunks."""
        return None if self.sharing is None else self.sharing.ranks

    @property
    def shape(self) -> ModelShape:
        return self.traces.shape

    def _plan_by(self, config: Config) -> None:
        """What plans are made by, and what they move."""
        shape = shape_of(self.data, self.updates)
        companions = self.updates.companions
        staged = companions is not None and companions.stages is not None
        settings = settings_of(config, self.room, self.sharing is not None or staged)
        cost = cost_of(config, shape, settings, self.data, self.updates)
        self.traces = Traces(shape, settings, cost, config.offload_activations)
        self.updates.straight.possible = settings.straight
        self.homes = Homes(self.updates, self.executor, self.streaming, settings, config.warmup_share)
        if config.offload_activations != OFF:
            made = Activations(self.store, config.offload_activations, self.executor.lock)
            made.spare = weakref.WeakMethod(self.homes.spare_host)
            self.room.activations = made

    def _reserve_hosted(self, choice: Choice) -> None:
        """Host modules' bytes, on the host's budget (where there is one tier only, on that)."""
        count = self.unmanaged.host_bytes(choice.dtypes)
        tier = "host" if self.ledger.budgets["host"] else "device"
        self.ledger.reserve(tier, HOSTED, count)
        self._release_hosted = weakref.finalize(self.executor, self.ledger.release, tier, HOSTED, count)

    def _adoption(self, source: Source | None) -> Adoption:
        """`source`: has values that the module has not."""
        return Adoption(self.data, self.updates, self.homes, self.room, self.unmanaged, self.sharing, source)

    def undo(self, source: Source | None) -> None:
        """The beginning failed: the user's module is as it was."""
        self.interceptor.remove()
        self._adoption(source).give_back()
        self.streaming.close()
        _release(self.store)
        if self.sharing is not None:
            self.sharing.close()
        self.room.peers.discard(self.room)

    # -- training passes ------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no training pass is under way."""
        return self.course.phase == IDLE

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around a forward pass without gradients. Between training passes nobody has foreseen what its activations
        take: as much as those of training, as far as chunks have somewhere to go."""
        before, guessed = None, False
        with torch.inference_mode(False), torch.no_grad():
            if self.lock_free is not None:
                self.lock_free.begin_evaluation()
            self.executor.updater.bring_all()  # there is room for them in the moments of training
            if self.idle and not self.ledger.device_alone:
                self.room.begin_turn()
                before, plan = self.room.level, self.course.plan
                guessed = self.ledger.is_guess("device")
                level = self.homes.first_level(self.shape) if plan is None else max(plan.levels, default=0)
                self.room.raise_level(max(level, before), guess=True)
        try:
            with self.interceptor.scope():
                yield
        except BaseException:
            if self.idle:
                self.executor.let_go()
            raise
        finally:
            if before is not None:
                with torch.inference_mode(False), torch.no_grad():
                    self.room.go_back(before, guessed)

    def begin_training(self, signature: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training pass is about to run forward: find its plan, or the way to one."""
        self.reclaim()
        self.interceptor.watch_gradients()
        self.unfreezing.notice()
        self._forwards = 1 if self.idle else self._forwards + 1
        if self._forwards > MANY:
            self._stop_recording()
        if self._forwards > 1:
            return  # a second forward before one backward belongs to the same pass
        if self.sharing is not None:
            self.sharing.turn()
        over = self.recording.take()
        if over is not None:
            self.traces.learn(over)
        known = self.planning.find(signature, args, kwargs)
        if self.sharing is not None:
            self.planning.begin_together(self.sharing, known, self.micro)
        plan = self.planning.adopt(known) if known is not None else None
        if known is None or known.stale or known.record.source != "live":
            self.recording.start(signature, args, kwargs)
        offset = 0 if plan is None else self.micro % plan.accumulate * len(plan.record.moments)
        if plan is None:
            self.homes.settle()
            self.room.raise_level(self.homes.first_level(self.shape), guess=True)
        if self.lock_free is not None:
            homes, states = self.homes.homes, self.shape.state_bytes
            self.lock_free.open([i for i, count in enumerate(states) if count and homes[i] != "device"])
            self.lock_free.begin_pass()
        self.updates.take_over = plan is not None and plan.take_over
        self.resting.begin(known, plan, offset)
        self.executor.begin(plan, self.recording.recorder, offset)

    def reclaim(self) -> None:
        """Parameters whose space gradients took are wanted again before the update; gradients that were being dropped
        are not."""
        self.room.begin_turn()
        if self.updates.unwanted:
            self.drop_gradients()
        if self.updates.taken.away:
            self.updates.taken.give_back()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a forward pass: hooks on, and everything let go of where it raises."""
        try:
            with self.interceptor.scope(), self.recording.metered():
                yield
            if self.course.phase == RUNNING:
                self.meet(FORWARD, self.micro)
        except BaseException:
            self.abandon()
            raise

    @contextmanager
    def reversing(self, last: bool) -> Iterator[None]:
        """Around autograd's backward. After one that is not the pass's `last`, forward passes go on."""
        self.planning.portion.go_on()
        self.executor.reverse()
        if not last:
            self.resting.rule_out()
        with self.running():
            with self.resting.reversing():
                yield
            self.updates.finish_backward()
            if not last:
                # Nobody waits for another stage while a rank of this one gathers.
                self.meet(FORWARD, self.micro)
        if last:
            self._finish_pass()
        else:
            self.executor.turn()

    def _finish_pass(self) -> None:
        if self.resting.now:
            self.resting.finish()
        elif self.recording.finish():
            self.executor.recorder = None
        elif (plan := self.course.plan) is not None:
            known = self.traces.find(plan.record.signature)
            if known is not None:
                known.followed = not self.course.off_track()
                known.stale = known.stale or not known.followed
        self.executor.finish()
        self.micro += 1

    def abandon(self) -> None:
        """A pass raised: what it held is released, its trace is thrown away."""
        self._stop_recording()
        self.executor.let_go()
        self.executor.finish()
        for parameter in self.data.parameters:
            parameter.grad = None  # one that arrived and was not taken would be added to the next

    def _stop_recording(self) -> None:
        self.recording.abandon()
        self.executor.recorder = None

    def meet(self, deed: int, number: int = 0) -> None:
        """Where ranks share the chunks, all of them are there."""
        if self.sharing is not None:
            self.sharing.meet(deed, number)

    def of_all_ranks(self, losses: list[torch.Tensor]) -> list[float]:
        """Of each rank the first that is not finite, if there is one; else its last. Some stages of a pipeline have
        none."""
        values = [float(loss) for loss in losses]
        if self.sharing is None or not values:
            return values
        bad = [value for value in values if not math.isfinite(value)]
        return [float(row) for row in self.sharing.ranks.objects((bad or values)[-1])]

    def average_unmanaged(self) -> None:
        """Parameters outside the chunks get the mean gradients of the ranks."""
        if self.sharing is not None:
            self.sharing.average(self.unmanaged.parameters)

    # -- update ---------------------------------------------------------------------------------------

    def apply(self, scale: float) -> None:
        self.planning.portion.go_on()
        self.homes.settle()
        self.course.phase = UPDATING
        try:
            self.updates.apply(scale)
            self.meet(DONE)  # nobody is left alone with a gather that the update began
        finally:
            self.executor.finish()
            self.micro, self.pieces = 0, 1
            if self.sharing is not None:
                self.sharing.turn()

    def drop_gradients(self) -> None:
        self.updates.unwanted = True
        self.micro, self.pieces = 0, 1
        self.updates.discard()

    @property
    def offloaded_bytes(self) -> int:
        """Activations that were sent to the host or to SSD so far."""
        return self.room.activations.offloaded_bytes if self.room.activations is not None else 0

    def check_integrity(self) -> None:
        self.store.check_integrity()
        if self.lock_free is not None:
            self.lock_free.buffers.check()
        if self.room.activations is not None:
            self.room.activations.check()

    def close(self) -> None:
        """Gives all memory back; the module's parameters become placeholders."""
        if self.lock_free is not None:
            self.lock_free.close()
        self.executor.updater.close()
        self.streaming.close()
        self.updates.kept.clear()
        if self.room.activations is not None:
            self.room.activations.close()
        self.interceptor.remove()
        for index in range(len(self.layout.chunks)):
            self.data.unbind(index)
        _release(self.store)
        if self.sharing is not None:
            self.sharing.close()
        self._release_hosted()
        self.room.peers.discard(self.room)


def _release(store: ChunkStore) -> None:
    """All memory of a store goes back to its tiers, when nothing reads or writes it: an interrupt may have come between
    a request's start and its note."""
    if store.ssd_space is not None:
        store.ssd_space.disk.synchronize()
    for chunk in store.chunks.values():
        chunk.pins = 0
        store.free(chunk)
