"""What training passes run through, put together: data, executor, updates, plans, interception.

It knows nothing of configs' origins, files or users; nor of passes, which the session leads through it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from ebbtide.config import Config
from ebbtide.devices.device import when_gone
from ebbtide.kernels import RULES, Kernels
from ebbtide.layout import ALONE, Slicing, build_spread_layout, unit_elements
from ebbtide.memory.chunk_store import ChunkStore
from ebbtide.planner.activation_trips import OFF
from ebbtide.planner.shape import ModelShape
from ebbtide.runtime.activations.offload import ActivationOffload
from ebbtide.runtime.budgets import check_fit
from ebbtide.runtime.distributed.experts.adapters import ExpertLayer, find_layers
from ebbtide.runtime.distributed.experts.token_exchange import TokenExchange
from ebbtide.runtime.distributed.gather import ChunkSharing
from ebbtide.runtime.distributed.model_parallel import ModelParallel
from ebbtide.runtime.distributed.ranks import Ranks
from ebbtide.runtime.distributed.sharded_gradients import ShardedGradients
from ebbtide.runtime.fast_path import FastPath
from ebbtide.runtime.movement.eviction import HOSTED
from ebbtide.runtime.movement.executor import Executor
from ebbtide.runtime.movement.state_placement import StatePlacement, StateStreaming
from ebbtide.runtime.parameters.binding import ModelData, specs_of
from ebbtide.runtime.parameters.host_modules import HostModules
from ebbtide.runtime.parameters.initial_values import Source
from ebbtide.runtime.parameters.inplace_writes import Writes
from ebbtide.runtime.parameters.selection import Choice
from ebbtide.runtime.parameters.unmanaged import Unmanaged
from ebbtide.runtime.planning.earlier_passes import LiveOutputs, PendingForwards
from ebbtide.runtime.planning.evaluation_memory import EvaluationMemory
from ebbtide.runtime.planning.plan_cache import PlanCache
from ebbtide.runtime.planning.plan_choice import PlanChoice
from ebbtide.runtime.planning.planner_inputs import cost_of, settings_of, shape_of
from ebbtide.runtime.planning.tracer import SymbolicPasses, Tracer
from ebbtide.runtime.process_tiers import Tiers
from ebbtide.runtime.takeover import Takeover, Unfreeze
from ebbtide.runtime.updates.lock_free.policy import LockFree
from ebbtide.runtime.updates.update_queue import UpdateQueue
from ebbtide.runtime.updates.updates import Updates
from ebbtide.tracing.hooks import Interceptor, find_units


class Machinery:
    def __init__(
        self,
        module: nn.Module,
        choice: Choice,
        config: Config,
        tiers: Tiers,
        kernels: Mapping[str, Kernels],
        ranks: Ranks | None = None,
        companions: ModelParallel | None = None,
    ) -> None:
        """`ranks`: those that share the chunks."""
        self.module, self.config, self.companions = module, config, companions
        self.activations: ActivationOffload | None = None
        self.backend, self.ledger = tiers.backend, tiers.ledger
        parameters, runs, units = find_units(module, list(choice.managed.values()))
        name_of = {id(p): n for n, p in choice.managed.items()}
        names = [name_of[id(p)] for p in parameters]
        specs = specs_of(names, parameters, [choice.dtypes[n] for n in names])
        slicing = ALONE if ranks is None else Slicing(ranks.size, ranks.rank)
        layers, self.gathered_experts = find_layers(module, specs, slicing.ranks, config)
        """Layers whose experts cannot be spread, and why."""
        banks = [layer.bank for layer in layers]
        size = None if config.chunk_size == "auto" else unit_elements(specs, int(config.chunk_size))
        self.layout = build_spread_layout(specs, banks, config.layout, size, slicing.ranks)
        self.store = ChunkStore(self.layout, self.backend, self.ledger, tiers.disk, slicing)
        self.data = ModelData(names, parameters, runs, self.layout, self.store, config.resolved_master)
        self.streaming = StateStreaming(self.store, config.prefetch)
        self.queue = UpdateQueue(config.prefetch, self.streaming)
        self.executor = Executor(self.data, config.eviction, self.queue)
        self.room, self.places = self.executor.room, self.executor.places
        self.course = self.executor.course
        self.room.peers = tiers.rooms
        self.room.begin_turn()  # what others only guess that they will take keeps nothing from this one
        self._make_updates(kernels, ranks, companions)
        self._put_beside(choice, kernels)
        self.interceptor = Interceptor(
            module, parameters, runs, units, self.executor, self.updates.sink.stand_ins.cover
        )
        carried = HostModules(choice.hosted.values(), self.backend.device, self.store.traffic.moved)
        for handle in carried.handles:
            self.interceptor.keep(handle)
        self._plan_by(config)
        self.dispatchers = self._dispatch(layers)
        self._make_plans(companions)
        when_gone(self.executor, partial(_release, self.store))

    # -- putting together -----------------------------------------------------------------------------

    def _make_updates(
        self, kernels: Mapping[str, Kernels], ranks: Ranks | None, companions: ModelParallel | None
    ) -> None:
        config, rule = self.config, RULES[self.config.optimizer.name]
        made = Updates(self.data, rule, kernels, self.executor, self.queue, config.updates == "in-backward")
        self.updates = made
        made.companions = companions
        if companions is not None:
            companions.know(self.data.names)
        made.stop_nonfinite = config.nonfinite == "stop"
        made.sink.norm_wanted = config.updates != "in-backward"
        made.scaled = config.precision == "fp16"
        made.add_chunks()
        self.sharing = None if ranks is None else self._share(ranks, kernels["device"])
        self.executor.on_gradient = made.capture
        self.executor.reclaim = made.sink.parameter_space.reclaim
        self.data.carry_on = Writes(self.data, kernels["host"], made.sink.parameter_space).carry_on
        # On a GPU the copy is a thousandth of a step, and the allocator's counters could not tell them apart.
        as_they_are = self.backend.kind == "cpu" and ranks is None
        made.sink.in_place.always = as_they_are and self.ledger.device_alone
        made.sink.in_place.where_planned = as_they_are and made.in_backward and self.store.near == "device"

    def _put_beside(self, choice: Choice, kernels: Mapping[str, Kernels]) -> None:
        """What goes on beside the chunks, and whether all of it has room."""
        config = self.config
        self.data.written_on_ssd = self.streaming.note  # what was read ahead is out of date
        self.lock_free = self._lock_free(config) if config.updates == "lock-free" else None
        rule, accumulates = self.updates.rule, config.accumulate > 1
        self.unmanaged = Unmanaged(self.module, choice, self.backend, kernels, rule, accumulates)
        self._reserve_hosted(choice)
        self.recording = Tracer(self.backend, self.unmanaged, self.updates.sink.in_place)
        spared = sum(room.copies() for room in self.room.peers)
        if self.sharing is not None:
            spared += self.sharing.reductions.extra()
        check_fit(self.ledger, config, shape_of(self.data, self.updates), spared)

    def _make_plans(self, companions: ModelParallel | None) -> None:
        """Who makes plans, from what, and who acts by them."""
        saved = self.room.activations is not None
        self.imagining = SymbolicPasses(self.module, self.data, self.interceptor, self.unmanaged, saved)
        # Where ranks share the chunks each has the same plan, whatever else it does.
        give_up = self.homes.give_up if self.sharing is None else lambda needed: 0
        self.evaluations = EvaluationMemory(self.imagining, self.room, self.traces.shape, give_up)
        self.outputs = LiveOutputs(self.backend)
        if companions is not None and companions.split:
            self.imagining.obstacle = (
                "tensor parallelism has split the model: its collectives cannot be imagined"
            )
        elif self.dispatchers:
            self.imagining.obstacle = (
                "experts are spread over ranks: how many tokens come is not known before"
            )
        self.planning = PlanChoice(
            self.config, self.executor, self.traces, self.homes, self.streaming, self.imagining, self.sharing
        )
        still = self.config.device.memory == "auto" and self.sharing is None and not self.updates.in_backward
        others = companions or self.lock_free or self.room.activations
        self.resting = FastPath(
            self.interceptor, self.updates, self.ledger, possible=still and others is None
        )
        self.waiting = PendingForwards(self.data, self.traces, self.imagining)
        self.unfreezing = Unfreeze(self.updates, self.room, self.homes, self.traces, self.sharing)

    def _lock_free(self, config: Config) -> LockFree:
        made = LockFree(self.updates.chunks, self.executor, config.max_staleness, config.waiting_width)
        self.updates.lock_free = made
        self.data.ever_newer = True
        self.executor.beside, self.data.before_values = made.tick, made.drain
        return made

    def _share(self, ranks: Ranks, kernels: Kernels) -> ChunkSharing:
        made = ChunkSharing(self.data, self.places, ranks, kernels, self.updates.in_backward)
        self.places.gather, self.data.collect = made.gather, made.collect
        self.room.end_exchange = made.reductions.finish
        self.updates.shares = ShardedGradients(self.updates, self.executor, made)
        made.reductions.reserve()
        return made

    def _dispatch(self, layers: Sequence[ExpertLayer]) -> list[TokenExchange]:
        """Layers whose experts ranks have among them send tokens from now on."""
        if self.sharing is None:
            return []
        made = [TokenExchange(i, layer, self.sharing, self.executor.lock) for i, layer in enumerate(layers)]
        for dispatcher in made:
            self.interceptor.keep(dispatcher)
        return made

    def _plan_by(self, config: Config) -> None:
        """What plans are made by, and what they move."""
        shape = shape_of(self.data, self.updates)
        companions = self.companions
        staged = companions is not None and companions.stages is not None
        settings = settings_of(config, self.room, self.sharing is not None or staged)
        cost = cost_of(config, shape, settings, self.data, self.updates)
        self.traces = PlanCache(shape, settings, cost, config.offload_activations)
        self.updates.sink.host_direct.possible = settings.straight
        self.homes = StatePlacement(self.executor, self.streaming, settings, config.warmup_share)
        if config.offload_activations != OFF:
            made = ActivationOffload(self.store, config.offload_activations, self.executor.lock)
            made.spare = weakref.WeakMethod(self.homes.spare_host)
            self.activations = self.room.activations = made

    def _reserve_hosted(self, choice: Choice) -> None:
        """Host modules' bytes, on the host's budget (where there is one tier only, on that)."""
        count = self.unmanaged.host_bytes(choice.dtypes)
        tier = "host" if self.ledger.budgets["host"] else "device"
        self.ledger.reserve(tier, HOSTED, count)
        self._release_hosted = weakref.finalize(self.executor, self.ledger.release, tier, HOSTED, count)

    def _adoption(self, source: Source | None) -> Takeover:
        """`source`: has values that the module has not."""
        return Takeover(self.data, self.updates, self.homes, self.room, self.unmanaged, self.sharing, source)

    # -- in use ---------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Ranks | None:
        """Those that share the chunks."""
        return None if self.sharing is None else self.sharing.ranks

    @property
    def shape(self) -> ModelShape:
        return self.traces.shape

    @property
    def offloaded_bytes(self) -> int:
        """Activations that were sent to the host or to SSD so far."""
        return self.activations.offloaded_bytes if self.activations is not None else 0

    def check_integrity(self) -> None:
        self.store.check_integrity()
        self.data.check()
        if self.lock_free is not None:
            self.lock_free.check()
        if self.activations is not None:
            self.activations.check()

    # -- its end --------------------------------------------------------------------------------------

    def undo(self, source: Source | None) -> None:
        """The beginning failed: the user's module is as it was."""
        self.interceptor.remove()
        self._adoption(source).give_back()
        self.streaming.close()
        _release(self.store)
        if self.sharing is not None:
            self.sharing.close()
        self.room.peers.discard(self.room)

    def close(self) -> None:
        """Gives all memory back; the module's parameters become placeholders."""
        if self.lock_free is not None:
            self.lock_free.close()
        self.queue.close()
        self.streaming.close()
        self.updates.sink.in_place.clear()
        if self.activations is not None:
            self.activations.close()
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
