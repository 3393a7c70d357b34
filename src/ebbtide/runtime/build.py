"""Puts the parts of the runtime together, in one function: what each is handed, and in which order.

It knows nothing of configs' origins, files or users; nor of passes, which the session leads through the parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ebbtide.config import Config
from ebbtide.devices import Backend
from ebbtide.devices.device import when_gone
from ebbtide.kernels import RULES, Kernels
from ebbtide.kernels.rule import limited
from ebbtide.layout import ALONE, Layout, Slicing, build_spread_layout, unit_elements
from ebbtide.memory.budget import Ledger
from ebbtide.memory.chunk_store import ChunkStore
from ebbtide.planner.activation_trips import OFF
from ebbtide.planner.shape import Settings
from ebbtide.runtime.activations.offload import ActivationOffload
from ebbtide.runtime.budgets import check_fit
from ebbtide.runtime.distributed.experts.adapters import ExpertLayer, find_layers
from ebbtide.runtime.distributed.experts.token_exchange import TokenExchange
from ebbtide.runtime.distributed.gather import ChunkSharing
from ebbtide.runtime.distributed.model_parallel import ModelParallel
from ebbtide.runtime.distributed.ranks import Ranks
from ebbtide.runtime.distributed.sharded_gradients import ShardedGradients
from ebbtide.runtime.fast_path import FastPath
from ebbtide.runtime.movement.eviction import HOSTED, Room
from ebbtide.runtime.movement.executor import Executor
from ebbtide.runtime.movement.fetch_on_demand import FetchOnDemand
from ebbtide.runtime.movement.plan_cursor import PlanCursor
from ebbtide.runtime.movement.state_placement import StatePlacement, StateStreaming
from ebbtide.runtime.parameters.binding import ModelData
from ebbtide.runtime.parameters.compiled_blocks import choose_blocks
from ebbtide.runtime.parameters.host_modules import HostModules
from ebbtide.runtime.parameters.initial_values import Source
from ebbtide.runtime.parameters.inplace_writes import Writes
from ebbtide.runtime.parameters.places import specs_of
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
from ebbtide.tracing.hooks import Interceptor, Unit, find_units


@dataclass(frozen=True)
class Parts:
    """What training passes run through. `sharing`, `lock_free` and `activations` are there where they are asked for."""

    module: nn.Module
    config: Config
    backend: Backend
    ledger: Ledger
    layout: Layout
    store: ChunkStore
    data: ModelData
    queue: UpdateQueue
    room: Room
    cursor: PlanCursor
    places: FetchOnDemand
    updates: Updates
    executor: Executor
    streaming: StateStreaming
    homes: StatePlacement
    lock_free: LockFree | None
    activations: ActivationOffload | None
    sharing: ChunkSharing | None
    companions: ModelParallel | None
    unmanaged: Unmanaged
    units: Sequence[Unit]
    interceptor: Interceptor
    recording: Tracer
    imagining: SymbolicPasses
    traces: PlanCache
    planning: PlanChoice
    evaluations: EvaluationMemory
    outputs: LiveOutputs
    waiting: PendingForwards
    resting: FastPath
    unfreezing: Unfreeze
    dispatchers: Sequence[TokenExchange]
    gathered_experts: Mapping[str, str]
    """Layers whose experts cannot be spread, and why."""
    release_hosted: Callable[[], object]

    def takeover(self, source: Source | None) -> Takeover:
        """`source`: has values that the module has not."""
        return Takeover(self.data, self.updates, self.homes, self.room, self.unmanaged, self.sharing, source)

    def check_integrity(self) -> None:
        self.store.check_integrity()
        self.data.check()
        if self.lock_free is not None:
            self.lock_free.check()
        if self.activations is not None:
            self.activations.check()

    def undo(self, source: Source | None) -> None:
        """The beginning failed: the user's module is as it was."""
        self.interceptor.remove()
        self.takeover(source).give_back()
        self.streaming.close()
        self._give_memory_back()

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
        self._give_memory_back()
        self.release_hosted()

    def _give_memory_back(self) -> None:
        self.store.release()
        if self.sharing is not None:
            self.sharing.close()
        self.room.peers.discard(self.room)


def build(
    module: nn.Module,
    choice: Choice,
    config: Config,
    tiers: Tiers,
    kernels: Mapping[str, Kernels],
    ranks: Ranks | None = None,
    companions: ModelParallel | None = None,
) -> Parts:
    """`kernels` by tier; `ranks`: those that share the chunks."""
    backend, ledger = tiers.backend, tiers.ledger
    in_backward = config.updates == "in-backward"

    # Tensors to chunks.
    layout, layers, gathered = _lay_out(module, choice, config, ranks)
    apart = [*choice.hosted.values(), *(layer.module for layer in layers)]
    blocks = choose_blocks(module, config.compile == "blocks", apart)
    parameters, runs, units = find_units(
        module, list(choice.managed.values()), [b.module for b in blocks.all]
    )
    name_of = {id(p): n for n, p in choice.managed.items()}
    names = [name_of[id(p)] for p in parameters]
    store = ChunkStore(layout, backend, ledger, tiers.disk, ALONE if ranks is None else _slicing(ranks))
    queue = UpdateQueue(config.prefetch, store)
    data = ModelData(names, parameters, runs, layout, store, config.resolved_master, queue)

    # Movement.
    cursor = PlanCursor(len(layout.chunks))
    room = Room(data, cursor, queue, config.eviction, tiers.rooms)
    room.begin_turn()  # what others only guess that they will take keeps nothing from this one
    places = FetchOnDemand(data, cursor, room)

    # Gradients and updates.
    if companions is not None:
        companions.know(names)
    rule = limited(RULES[config.optimizer.name], config.clip_value)
    updates = Updates(rule, kernels, places, cursor, queue, config, companions)
    data.follow_writes_by(Writes(data, kernels["host"], updates.sink.parameter_space, places))
    sharing = None
    if ranks is not None:
        sharing = ChunkSharing(data, places, ranks, kernels["device"], in_backward)
        updates.shares = ShardedGradients(updates, places, cursor, sharing)
        sharing.reductions.reserve()
    updates.sink.keep_in_place(alone=ranks is None, in_backward=in_backward)
    executor = Executor(places, cursor, queue, updates)
    lock_free = None
    if config.updates == "lock-free":
        lock_free = updates.lock_free = LockFree(
            updates.chunks, executor, config.max_staleness, config.waiting_width
        )

    # What is outside the chunks, and whether all of it has room.
    unmanaged = Unmanaged(module, choice, backend, kernels, updates.rule, config.accumulate > 1)
    release_hosted = _reserve_hosted(executor, ledger, unmanaged.host_bytes(choice.dtypes))
    recording = Tracer(backend, unmanaged, updates.sink.in_place)
    spared = sum(peer.copies() for peer in room.peers)
    spared += sharing.reductions.extra() if sharing is not None else 0
    check_fit(ledger, config, shape_of(data, updates), spared)
    interceptor = Interceptor(module, parameters, runs, units, executor, updates.sink.stand_ins.cover, blocks)
    for handle in HostModules(choice.hosted.values(), backend.device, store.traffic).handles:
        interceptor.keep(handle)
    dispatchers = _dispatch(layers, sharing, executor, interceptor)

    # Plans: from what they are made, and who acts by them.
    staged = companions is not None and companions.stages is not None
    settings = settings_of(config, room, sharing is not None or staged)
    traces = _plan_cache(config, settings, data, updates)
    streaming = StateStreaming(store, config.prefetch)
    homes = StatePlacement(data, cursor, places, queue, streaming, settings, config.warmup_share)
    activations = None
    if config.offload_activations != OFF:
        activations = room.activations = ActivationOffload(
            store, config.offload_activations, executor.lock, homes.spare_host
        )
    imagining = SymbolicPasses(
        module, data, interceptor, unmanaged, activations is not None, _obstacle(companions, dispatchers)
    )
    # Where ranks share the chunks each has the same plan, whatever else it does.
    give_up = homes.give_up if sharing is None else lambda needed: 0
    alone = companions is None and lock_free is None and activations is None and sharing is None
    rests = alone and config.device.memory == "auto" and not in_backward
    parts = Parts(
        module=module,
        config=config,
        backend=backend,
        ledger=ledger,
        layout=layout,
        store=store,
        data=data,
        queue=queue,
        room=room,
        cursor=cursor,
        places=places,
        updates=updates,
        executor=executor,
        streaming=streaming,
        homes=homes,
        lock_free=lock_free,
        activations=activations,
        sharing=sharing,
        companions=companions,
        unmanaged=unmanaged,
        units=[unit for _, unit in units],
        interceptor=interceptor,
        recording=recording,
        imagining=imagining,
        traces=traces,
        planning=PlanChoice(config, room, cursor, traces, homes, streaming, imagining, sharing),
        evaluations=EvaluationMemory(imagining, room, traces.shape, give_up),
        outputs=LiveOutputs(backend),
        waiting=PendingForwards(data, traces, imagining),
        resting=FastPath(interceptor, updates, room, possible=rests),
        unfreezing=Unfreeze(updates, room, homes, traces, sharing),
        dispatchers=dispatchers,
        gathered_experts=gathered,
        release_hosted=release_hosted,
    )
    when_gone(executor, store.release)
    return parts


def _slicing(ranks: Ranks) -> Slicing:
    return Slicing(ranks.size, ranks.rank)


def _lay_out(
    module: nn.Module, choice: Choice, config: Config, ranks: Ranks | None
) -> tuple[Layout, Sequence[ExpertLayer], Mapping[str, str]]:
    """With the layers whose experts are spread over ranks, and those that cannot be, and why."""
    specs = specs_of(
        list(choice.managed), list(choice.managed.values()), [choice.dtypes[n] for n in choice.managed]
    )
    count = 1 if ranks is None else ranks.size
    layers, gathered = find_layers(module, specs, count, config)
    size = None if config.chunk_size == "auto" else unit_elements(specs, int(config.chunk_size))
    banks = [layer.bank for layer in layers]
    return build_spread_layout(specs, banks, config.layout, size, count), layers, gathered


def _reserve_hosted(executor: Executor, ledger: Ledger, count: int) -> Callable[[], object]:
    """Host modules' bytes, on the host's budget (where there is one tier only, on that): gives what releases them."""
    tier = "host" if ledger.budgets["host"] else "device"
    ledger.reserve(tier, HOSTED, count)
    return weakref.finalize(executor, ledger.release, tier, HOSTED, count)


def _dispatch(
    layers: Sequence[ExpertLayer], sharing: ChunkSharing | None, executor: Executor, interceptor: Interceptor
) -> Sequence[TokenExchange]:
    """Layers whose experts ranks have among them send tokens from now on."""
    if sharing is None:
        return ()
    made = [TokenExchange(i, layer, sharing, executor.lock) for i, layer in enumerate(layers)]
    for dispatcher in made:
        interceptor.keep(dispatcher)
    return made


def _plan_cache(config: Config, settings: Settings, data: ModelData, updates: Updates) -> PlanCache:
    shape = shape_of(data, updates)
    cost = cost_of(config, shape, settings, data, updates)
    updates.sink.host_direct.possible = settings.host_direct
    return PlanCache(shape, settings, cost, config.offload_activations)


def _obstacle(companions: ModelParallel | None, dispatchers: Sequence[TokenExchange]) -> str:
    """Why passes cannot be imagined, where that is known."""
    if companions is not None and companions.split:
        return "tensor parallelism has split the model: its collectives cannot be imagined"
    return "experts are spread over ranks: how many tokens come is not known before" if dispatchers else ""
