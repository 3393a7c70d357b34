"""One model's training machinery, put together: data, executor, updates, traces, interception.

The engine is its face. A session knows passes (forward, backward, update) and how they are traced and
planned; it knows nothing of configs, files or users.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from ebbtide.backend import Backend
from ebbtide.config import Config
from ebbtide.disk.space import DiskSpace
from ebbtide.errors import DiskError, IntegrityError
from ebbtide.intercept import Interceptor, find_units
from ebbtide.kernels import RULES, Kernels
from ebbtide.layout import build_layout, unit_elements
from ebbtide.memory.chunk import Chunk
from ebbtide.memory.chunks import ChunkStore
from ebbtide.memory.ledger import Ledger
from ebbtide.plan.activations import OFF
from ebbtide.plan.draft import Plan
from ebbtide.plan.execute import step_seconds
from ebbtide.plan.hostside import beside_updates
from ebbtide.plan.job import Job
from ebbtide.plan.machine import Machine
from ebbtide.plan.place import Cost
from ebbtide.plan.rates import Rates
from ebbtide.plan.shape import ModelShape, Settings, update_bytes
from ebbtide.plan.stage import stored_bytes
from ebbtide.record import Record
from ebbtide.run.activations import Activations
from ebbtide.run.executor import Executor
from ebbtide.run.hosted import HostModules
from ebbtide.run.jobs import Updater
from ebbtide.run.lockfree import LockFree
from ebbtide.run.model import ModelData, dense, specs_of
from ebbtide.run.setup import Choice, check_fit
from ebbtide.run.source import Source, replace
from ebbtide.run.streaming import Streaming
from ebbtide.run.traces import Known, Traces
from ebbtide.run.unmanaged import Unmanaged
from ebbtide.run.updates import Updates
from ebbtide.tracing.live import Recorder
from ebbtide.tracing.meter import AllocatorMeter, StorageMeter, storage_bytes
from ebbtide.tracing.symbolic import FakeParameters, scalar_loss, trace_symbolically

FIRST_BATCH = 20
"""One of so many parts of a device with SSD beside it is kept free for the first batch; before its operators run there
is a plan."""


class Session:
    def __init__(
        self,
        module: nn.Module,
        choice: Choice,
        config: Config,
        backend: Backend,
        ledger: Ledger,
        kernels: Mapping[str, Kernels],
        peers: WeakSet[Executor],
        source: Source | None = None,
        disk: DiskSpace | None = None,
    ) -> None:
        self.module, self.config, self.backend, self.ledger = module, config, backend, ledger
        parameters, runs, units = find_units(module, list(choice.managed.values()))
        name_of = {id(p): n for n, p in choice.managed.items()}
        names = [name_of[id(p)] for p in parameters]
        specs = specs_of(names, parameters, [choice.dtypes[n] for n in names])
        size = None if config.chunk_size == "auto" else unit_elements(specs, int(config.chunk_size))
        self.layout = build_layout(specs, config.layout, size)
        self.store = ChunkStore(self.layout, backend, ledger, disk)
        self.data = ModelData(names, parameters, runs, self.layout, self.store, config.resolved_master)
        self.executor = Executor(self.data, config.eviction, Updater(background=config.prefetch))
        self.updates = Updates(
            self.data, RULES[config.optimizer.name], kernels, self.executor, config.updates == "in-backward"
        )
        self.updates.stop_nonfinite = config.nonfinite == "stop"
        self.updates.norm_wanted = config.clip is not None or config.precision == "fp16"
        self.updates.add_chunks()
        self.executor.on_gradient = self.updates.capture
        self.executor.reclaim = self.updates.taken.reclaim
        # On a GPU the copy is a thousandth of a step, and the allocator's counters could not tell them apart.
        self.updates.kept.always = backend.kind == "cpu" and self._alone()
        self.updates.kept.where_planned = (
            backend.kind == "cpu" and self.updates.in_backward and self.store.near == "device"
        )
        self.updates.kept.claimed = self._claim
        self.executor.peers = peers
        self.streaming = Streaming(self.store, self.executor.updater, self.updates.state_chunks)
        self.data.written_on_ssd = self.streaming.note  # what was read ahead is out of date
        self.lock_free = self._lock_free(config) if config.updates == "lock-free" else None
        self.unmanaged = Unmanaged(module, choice, backend, kernels, RULES[config.optimizer.name])
        self._reserve_hosted(choice)
        self.shape = self._shape()
        self._check_fit()
        self.interceptor = Interceptor(module, parameters, runs, units, self.executor)
        carried = HostModules(choice.hosted.values(), backend.device, self.store.traffic.moved)
        for handle in carried.handles:
            self.interceptor.keep(handle)
        settings = Settings(
            self.budget("device"),
            self.budget("host"),
            config.placement,
            config.eviction,
            config.prefetch,
            config.accumulate,
            config.updates == "in-backward",
            config.resolved_master == "separate"
            and config.accumulate == 1
            and config.updates == "exact"
            and config.placement != "static",
            ssd=self.budget("ssd"),
            waiting_width=config.waiting_width,
            max_staleness=config.max_staleness,
        )
        if config.offload_activations != OFF:
            self.executor.activations = Activations(
                self.store, config.offload_activations, self.executor.lock
            )
            self.executor.activations.spare = weakref.WeakMethod(self._spare_host)
        self.traces = Traces(self.shape, settings, self._cost(settings), config.offload_activations)
        self.symbolic_note = ""
        self._pending: tuple[Record, Any] | None = None
        self._recorder: Recorder | None = None
        self._meter: Any = None
        self.micro = 0
        """Backward passes since the last update."""
        weakref.finalize(self.executor, _release, self.store)
        try:
            self._take_over(choice, source)
        except BaseException:
            self.undo(source)
            raise
        peers.add(self.executor)

    # -- setting up -----------------------------------------------------------------------------------

    def _lock_free(self, config: Config) -> LockFree:
        made = LockFree(self.updates.chunks, self.executor, config.max_staleness, config.waiting_width)
        self.updates.lock_free = made
        self.executor.beside, self.data.before_values = made.tick, made.drain
        return made

    def drain(self) -> None:
        """Waits for updates that go on beside the computation."""
        if self.lock_free is not None:
            self.lock_free.drain()
        self.executor.updater.flush()

    def _alone(self) -> bool:
        """Whether the device is the only tier: nothing can leave it."""
        return not self.ledger.budgets["host"] and not self.ledger.budgets["ssd"]

    def budget(self, tier: str) -> int:
        """What other engines on the same tier leave of the budget."""
        others = [peer for peer in self.executor.peers if peer is not self.executor]
        taken = sum(
            c.nbytes
            for peer in others
            for c in peer.store.chunks.values()
            if getattr(c, tier) is not None and c.kind not in ("param", "grad")
        )
        return self.ledger.budgets[tier] - self.ledger.tags[tier].get("host modules", 0) - taken

    def _reserve_hosted(self, choice: Choice) -> None:
        """Host modules' bytes, on the host's budget (where there is one tier only, on that)."""
        count = self.unmanaged.host_bytes(choice.dtypes)
        tier = "host" if self.ledger.budgets["host"] else "device"
        self.ledger.reserve(tier, "host modules", count)
        self._release_hosted = weakref.finalize(
            self.executor, self.ledger.release, tier, "host modules", count
        )

    def _shape(self) -> ModelShape:
        chunks = self.layout.chunks
        states = []
        for index in range(len(chunks)):
            states.append(sum(chunk.nbytes for chunk in self.updates.state_chunks(index)))
        params = tuple(self.data.parameter_chunk(i).nbytes for i in range(len(chunks)))
        grads = tuple(p if trained else 0 for p, trained in zip(params, self.data.trained, strict=True))
        places = tuple(place.chunk for place in self.data.places)
        return ModelShape(self.data.run_chunks, places, params, grads, tuple(states))

    def _cost(self, settings: Settings) -> Cost | None:
        """What a plan is worth: seconds on the machine that is described, else the bytes that it moves."""
        if not self.config.machine:
            return None
        rates = Rates(Machine.read(self.config.machine))
        updates = update_bytes(self.shape, self.config.resolved_master)
        kept = self.updates.kept.always or self.updates.kept.where_planned
        captured = () if kept else tuple(self._gradient_bytes())
        free, bound = settings.lock_free, self.config.max_staleness
        waits = not settings.prefetch
        return lambda plan: step_seconds(
            Job(
                self.shape,
                plan,
                settings,
                rates,
                updates,
                captured,
                blocking=waits,
                lock_free=free,
                max_staleness=bound,
            )
        )

    def _gradient_bytes(self) -> Iterator[int]:
        for place in self.data.places:
            yield place.numel * self.data.parameter_chunk(place.chunk).dtype.itemsize

    def _check_fit(self) -> None:
        shape = self.shape
        grads = sum(shape.gradient_bytes) if self.config.updates != "in-backward" else 0
        if self.config.resolved_master == "separate" and self.config.accumulate == 1:
            grads = 0
        needed = sum(shape.parameter_bytes) + sum(shape.state_bytes) + grads
        check_fit(self.ledger, needed, max(shape.parameter_bytes, default=0))

    def _take_over(self, choice: Choice, source: Source | None) -> None:
        """Moves the user's values, or the source's, into chunks, one chunk at a time."""
        kernels = self.updates.kernels["host"]
        for index, members in enumerate(self.data.members):
            home = self._first_home(index)
            self.updates.homes.append(home)
            param = self.data.parameter_chunk(index)
            tier = self.store.near if home == "ssd" else home
            self.executor.make_room_on(tier, param)
            self.store.allocate(param, tier)
            master = self.store.chunks.get(("master", index))
            if master is not None:
                self._give_place(master, home)
            for member in members:
                self.data.store_value(member, self._first_value(member, source), kernels)
                self.data.release_original(member)
            if tier == "device":
                self.data.bind(index)
        self._open_streaming(self._at_home("ssd"))
        if source is not None:
            source.fill()
        self.unmanaged.take_over(choice)
        level = self.first_level()
        if self.store.near == "device":
            level = min(level, self.ledger.budgets["device"] // FIRST_BATCH)
        self.executor.raise_level(level, guess=True)

    def _give_place(self, master: Chunk, home: str) -> None:
        """For a master whose values are about to be written."""
        if home == "ssd":
            self.store.reserve_ssd(master)
            master.mark("ssd", True)
        else:
            self.executor.allocate(master, home)

    def _open_streaming(self, chunks: Sequence[int]) -> None:
        on_ssd = [index for index in chunks if self.shape.state_bytes[index]]
        near = self.store.near
        self.streaming.open(
            on_ssd, self.executor.make_room if near == "device" else self.executor.make_host_room
        )

    def _first_value(self, member: int, source: Source | None) -> torch.Tensor:
        value = None if source is None else source.value(self.data.names[member])
        if value is None:
            return dense(self.data.parameters[member])
        place = self.data.places[member]
        if tuple(value.stride()) != place.stride:
            value = torch.empty_strided(place.shape, place.stride, dtype=value.dtype).copy_(value)
        return dense(value)

    def undo(self, source: Source | None) -> None:
        """The take-over failed: the user's module is as it was. Values that a broken disk has are lost with it."""
        kernels = self.updates.kernels["host"]
        self.interceptor.remove()
        for member, parameter in enumerate(self.data.parameters):
            if self.data.taken[member] and self.data.on_meta[member]:
                place = self.data.places[member]
                dtype = self.data.originals[member]
                replace(parameter, torch.empty_strided(place.shape, place.stride, dtype=dtype, device="meta"))
            elif self.data.taken[member]:
                with suppress(DiskError, IntegrityError):
                    value = self.data.load_value(member, kernels)
                    parameter.data = value.to(self.data.originals[member])
        if source is not None:
            source.undo()
        self.streaming.close()
        _release(self.store)
        self.executor.peers.discard(self.executor)

    def _first_home(self, index: int) -> str:
        """Before there is a plan: the host where it has room for all of the chunk's bytes, else SSD, else the device.
        Where there is SSD and no host, the device keeps half of its budget for what is not known yet."""
        shape, budgets = self.shape, self.ledger.budgets
        page = 2 * self.layout.unit * 4 if self.layout.cut == "page" else 0
        every = range(shape.chunks)
        buffers = beside_updates(shape, every, self.traces.settings, every if budgets["ssd"] else ())
        if not budgets["ssd"]:
            kinds = (shape.parameter_bytes, shape.gradient_bytes, shape.state_bytes)
            held = buffers + sum(count[i] for i in self._at_home("host") for count in kinds)
            fits = held + sum(count[index] for count in kinds) + page <= budgets["host"]
            return "host" if fits else "device"
        near = self.store.near
        held = sum(shape.parameter_bytes) + buffers + page
        held += sum(shape.gradient_bytes[i] + shape.state_bytes[i] for i in (*self._at_home(near), index))
        held += 2 * max(shape.parameter_bytes) if near == "host" else 0
        if held <= (budgets[near] // 2 if near == "device" else budgets[near]):
            return near
        on_ssd = [shape.state_bytes[i] for i in (*self._at_home("ssd"), index)]
        return (
            "ssd" if sum(stored_bytes(count, shape.piece) for count in on_ssd) <= budgets["ssd"] else "device"
        )

    def _at_home(self, tier: str) -> list[int]:
        return [i for i, home in enumerate(self.updates.homes) if home == tier]

    def first_level(self) -> int:
        """Without a trace: all but the warm-up share is left to non-model data, where chunks can leave."""
        if self._alone():
            return 0
        states = self.ledger.tags["device"].get("staging", 0) + sum(
            chunk.nbytes
            for index, home in enumerate(self.updates.homes)
            if home == "device"
            for chunk in self.updates.state_chunks(index)
        )
        room = int(self.ledger.budgets["device"] * self.config.warmup_share)
        largest = 2 * max(self.shape.parameter_bytes, default=0)
        return max(0, self.ledger.budgets["device"] - max(room, states + largest))

    # -- training passes ------------------------------------------------------------------------------

    def begin_training(self, signature: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training pass is about to run forward: find its plan, or the way to one."""
        self.reclaim()
        self.interceptor.watch_gradients()
        self._notice_unfrozen()
        if self.executor.phase != "idle":
            return  # a second forward before one backward belongs to the same pass
        self._learn_pending()
        known = self.traces.find(signature) or self._imagine(signature, args, kwargs)
        plan = self._adopt(known) if known is not None else None
        if known is None or known.stale or known.record.source != "live":
            self._record(signature, args, kwargs)
        offset = 0 if plan is None else self.micro % plan.accumulate * len(plan.record.moments)
        if plan is None:
            self.executor.raise_level(self.first_level(), guess=True)
        if self.lock_free is not None:
            homes, states = self.updates.homes, self.shape.state_bytes
            self.lock_free.open([i for i, count in enumerate(states) if count and homes[i] != "device"])
            self.lock_free.begin_pass()
        self.updates.take_over = plan is not None and plan.take_over
        self.executor.begin(plan, self._recorder, offset)

    def _notice_unfrozen(self) -> None:
        """Chunks whose first parameter has come to require gradients get master, moments and gradient."""
        data, updates = self.data, self.updates
        woken = [
            index
            for index, members in enumerate(data.members)
            if not data.trained[index] and any(data.parameters[m].requires_grad for m in members)
        ]
        for index in woken:
            data.trained[index] = True
            updates.add_chunk(index)
            master = self.store.chunks.get(("master", index))
            if master is not None:
                values = [(m, data.load_value(m, updates.kernels["host"])) for m in data.members[index]]
                self._give_place(master, updates.homes[index])
                for member, value in values:
                    data.store_value(member, dense(value), updates.kernels["host"])
            if updates.homes[index] == "ssd":
                self.drain()
                self.streaming.close()
                self._open_streaming(self._at_home("ssd"))
        if woken:
            self.shape = self._shape()
            self.traces.replan(self.shape)

    def reclaim(self) -> None:
        """Parameters whose space gradients took are wanted again before the update."""
        if self.updates.taken.members:
            self.updates.taken.give_back()

    def _learn_pending(self) -> None:
        if self._pending is not None:
            record, meter = self._pending
            self._pending = None
            self.traces.learn(record.carrying(max(0, meter.alive())))

    def _record(self, signature: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.backend.kind == "cuda":
            self._meter = AllocatorMeter(self.backend.device, lambda: self.backend.held()["device"])
            fixed = 0
        else:
            self._meter = StorageMeter(self._is_model_data)
            self._meter.note((args, kwargs))
            fixed = self.unmanaged.fixed_bytes()
        self.backend.watch(self._meter)
        inputs = storage_bytes(
            value
            for value in tree_iter((args, kwargs))
            if isinstance(value, torch.Tensor) and value.device == self.backend.device
        )
        self._recorder = Recorder(signature, self._meter, fixed, inputs)

    def _claim(self, storage: int) -> None:
        """A gradient is kept as it is: no longer non-model data."""
        if isinstance(self._meter, StorageMeter):
            self._meter.disown(storage)

    def _is_model_data(self, storage: int) -> bool:
        return (
            self.backend.owns(storage)
            or storage in self.unmanaged.storages
            or self.updates.kept.owns(storage)
        )

    def _imagine(self, signature: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """A symbolic trace, so that even the first iteration has a plan. Not needed where all is resident."""
        if self._alone() and self.config.device.memory == "auto":
            return None
        data = self.data
        fake = FakeParameters(
            tuple(data.run_of),
            tuple(p.shape for p in data.places),
            tuple(p.stride for p in data.places),
            tuple(data.store.chunks["param", p.chunk].dtype for p in data.places),
            tuple(p.requires_grad for p in data.parameters),
            self.backend.device,
        )
        try:
            record = trace_symbolically(
                self.module,
                fake,
                args,
                kwargs,
                signature,
                self.unmanaged.fixed_bytes(),
                self.interceptor.substituted,
                scalar_loss,
                saved=self.executor.activations is not None,
            )
        except Exception as reason:
            # Any operator may lack a fake kernel; the first iteration is then cautious instead.
            self.symbolic_note = f"{type(reason).__name__}: {reason}"
            return None
        return self.traces.learn(record)

    def _adopt(self, known: Known) -> Plan | None:
        """Brings optimizer state to the plan's homes. An imagined plan that does not fit is no refusal yet
        where the device could still hold it by demand: then the error says so at once."""
        plan = self.traces.plan(known)
        if plan is not self.executor.plan or self.updates.homes != list(plan.homes):
            self._move_home(plan)
        self.streaming.expect(
            plan.update_order(self.config.updates == "in-backward", self.shape.parameter_chunk)
        )
        return plan

    def _spare_host(self, needed: int) -> None:
        """Parameters whose state lives on the device give up their copies on the host where that is wanted."""
        self.executor.make_host_room(needed)
        for index, home in enumerate(self.updates.homes):
            chunk = self.data.parameter_chunk(index)
            if self.ledger.room("host") >= needed:
                return
            if home != "device" or chunk.host is None or chunk.work is not None:
                continue
            if not chunk.device_valid and self.ledger.room("device") >= self.store.room_needed(
                chunk, "device"
            ):
                self.executor.bring(chunk)
            if chunk.device_valid and chunk.move is None:
                self.store.drop(chunk, "host")

    def _move_home(self, plan: Plan) -> None:
        homes = self.updates.homes
        moving = [i for i, home in enumerate(plan.homes) if home != homes[i]]
        if self.lock_free is not None and moving:
            self.lock_free.open([])
        self.executor.updater.flush()
        self.executor.plan = None
        if self.executor.activations is not None:
            self.executor.activations.foresee(plan.away)
        restaged = any("ssd" in (homes[i], plan.homes[i]) for i in moving)
        if restaged:
            self.streaming.close()
        leaving = [i for i in moving if plan.homes[i] != "device"]
        for index in sorted(leaving, key=lambda i: plan.homes[i] != "ssd"):
            self._move_state(index, plan.homes[index])
        self.executor.raise_level(max(plan.levels, default=0))
        if restaged:
            self._open_streaming([i for i, home in enumerate(plan.homes) if home == "ssd"])
        for index in moving:
            self._move_state(index, plan.homes[index])

    def _move_state(self, index: int, home: str) -> None:
        for chunk in self.updates.state_chunks(index):
            self.executor.go_home(chunk, home)
        self.updates.homes[index] = home

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a forward pass: hooks on, and everything let go of where it raises."""
        metered = self._meter if isinstance(self._meter, StorageMeter) and self._recorder else nullcontext()
        try:
            with self.interceptor.scope(), metered:
                yield
        except BaseException:
            self.abandon()
            raise

    def backward(self, loss: torch.Tensor) -> None:
        self.executor.reverse()
        with self.running():
            loss.backward()
            self.updates.finish_backward()
        self._finish_pass()

    def _finish_pass(self) -> None:
        executor = self.executor
        if self._recorder is not None:
            self._pending = (self._recorder.finish(), self._meter)
            self.backend.watch(None)
            self._recorder = None
            executor.recorder = None
        elif executor.plan is not None and self._off_track():
            known = self.traces.find(executor.plan.record.signature)
            if known is not None:
                known.stale = True
        executor.finish()
        self.micro += 1

    def _off_track(self) -> bool:
        executor = self.executor
        plan = executor.plan
        assert plan is not None
        length = len(plan.record.moments)
        return not executor.on_track or (executor.position + 1) % length != 0

    def abandon(self) -> None:
        """A pass raised: what it held is released, its trace is thrown away."""
        self._recorder = None
        self.executor.recorder = None
        self.backend.watch(None)
        self.executor.finish()
        for parameter in self.data.parameters:
            parameter.grad = None  # one that arrived and was not taken would be added to the next

    # -- update ---------------------------------------------------------------------------------------

    def apply(self, scale: float) -> None:
        self.executor.phase = "update"
        try:
            self.updates.apply(scale)
        finally:
            self.executor.finish()
            self.micro = 0

    def drop_gradients(self) -> None:
        self.updates.discard()
        self.micro = 0

    @property
    def offloaded_bytes(self) -> int:
        """Activations that were sent to the host or to SSD so far."""
        return self.executor.activations.offloaded_bytes if self.executor.activations is not None else 0

    def check_integrity(self) -> None:
        self.store.check_integrity()
        if self.lock_free is not None:
            self.lock_free.buffers.check()
        if self.executor.activations is not None:
            self.executor.activations.check()

    def close(self) -> None:
        """Gives all memory back; the module's parameters become placeholders."""
        if self.lock_free is not None:
            self.lock_free.close()
        self.executor.updater.drop()
        self.streaming.close()
        self.updates.kept.clear()
        if self.executor.activations is not None:
            self.executor.activations.close()
        self.interceptor.remove()
        for index in range(len(self.layout.chunks)):
            self.data.unbind(index)
        _release(self.store)
        self._release_hosted()
        self.executor.peers.discard(self.executor)


def _release(store: ChunkStore) -> None:
    """All memory of a store goes back to its tiers."""
    for chunk in store.chunks.values():
        chunk.pins = 0
        store.free(chunk)
