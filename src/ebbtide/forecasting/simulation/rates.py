"""What a rank's operators, moves, collectives and updates take on a machine, and which resources they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ebbtide.forecasting.simulation.machine import Machine
from ebbtide.forecasting.simulation.simulator import Shares
from ebbtide.planner.plans import Plan
from ebbtide.planner.record import Moment
from ebbtide.planner.shape import ModelShape, Settings

DRAM, CORES, DISK = "memory", "cores", "disk"
COMPUTE, HOST, TO_DEVICE, TO_HOST, READ, WRITE, WIRE = (
    "compute",
    "host",
    "host_to_device",
    "device_to_host",
    "ssd_read",
    "ssd_write",
    "wire",
)
LANES = (COMPUTE, HOST, TO_DEVICE, TO_HOST, READ, WRITE, WIRE)


@dataclass(frozen=True)
class Rates:
    """Of one rank: what a node has is divided by its devices."""

    machine: Machine

    @property
    def ranks(self) -> int:
        return self.machine.devices

    @cached_property
    def on_cpu(self) -> bool:
        return self.machine.device.kind == "cpu"

    @cached_property
    def dram(self) -> float:
        return self.machine.host.bandwidth / self.machine.devices_per_node

    @cached_property
    def update_rate(self) -> float:
        host = self.machine.host
        return (host.update or 0.8 * host.bandwidth) / self.machine.devices_per_node

    def compute(self, moment: Moment) -> float:
        return sum(self.machine.seconds(work) for work in moment.work)

    def move(self, count: int) -> float:
        return self.machine.links.latency + count / self.machine.links.host_device

    def update_on_device(self, count: float) -> float:
        rate = self.update_rate if self.on_cpu else 0.8 * self.machine.device.bandwidth
        return self.machine.device.launch + count / rate

    def update_on_host(self, count: float) -> float:
        return count / self.update_rate

    def capture(self, count: int) -> float:
        """A gradient is read where autograd made it and written where it waits."""
        return self.machine.device.launch + 2 * count / self.machine.device.bandwidth

    def disk(self, count: float, read: bool) -> float:
        ssd = self.machine.ssd
        return count * self.machine.devices_per_node / (ssd.read if read else ssd.write)

    def disk_both(self, count: float) -> float:
        """As much read as written."""
        return self.disk_mixed(count, count)

    def disk_mixed(self, read: float, written: float) -> float:
        """Both at once or one after the other, whatever the disks do better."""
        reading, writing = self.disk(read, True), self.disk(written, False)
        both = (read + written) * self.machine.devices_per_node / self.machine.ssd.total
        return max(reading, writing, min(both, reading + writing))

    def gather(self, whole: int, ranks: int, rounds: int = 1) -> float:
        """All ranks' slices to each of them, or a reduction to slices: within nodes and between them at once."""
        if ranks <= 1:
            return 0.0
        links, each = self.machine.links, self.machine.devices_per_node
        inside = min(ranks, each)
        nodes = -(-ranks // each)
        within = whole * (inside - 1) / inside / links.device_device if inside > 1 else 0.0
        between = whole * (nodes - 1) / nodes / links.node_node if nodes > 1 else 0.0
        return rounds * links.latency + max(within, between)

    def exchange(self, count: int, ranks: int) -> float:
        """All-to-all: each rank sends `count` bytes, spread over all of them."""
        if ranks <= 1:
            return 0.0
        links, each = self.machine.links, self.machine.devices_per_node
        nodes = -(-ranks // each)
        outside = count * (nodes - 1) / nodes
        between = outside * min(ranks, each) / links.node_node
        return links.latency + max((count - outside) / links.device_device, between)

    def shares(self, lane: str) -> Shares:
        return self._shares[lane]

    @cached_property
    def _shares(self) -> dict[str, Shares]:
        links, ssd, host = self.machine.links, self.machine.ssd, self.machine.host
        each = self.machine.devices_per_node
        if self.on_cpu:
            one = 1 / host.cores
            cores = {COMPUTE: 1.0, HOST: 1.0, TO_DEVICE: one, TO_HOST: one, READ: one / 2, WRITE: one / 2}
            found: dict[str, Shares] = {lane: ((CORES, share),) for lane, share in cores.items()}
        else:
            crossing = ((DRAM, min(1.0, links.host_device / self.dram)),)
            update = ((DRAM, min(1.0, self.update_rate / self.dram)),)
            found = {COMPUTE: (), HOST: update, TO_DEVICE: crossing, TO_HOST: crossing, READ: (), WRITE: ()}
        for lane, rate in ((READ, ssd.read), (WRITE, ssd.write)):
            memory = () if self.on_cpu else ((DRAM, min(1.0, rate / each / self.dram)),)
            found[lane] = (*found[lane], *memory, (DISK, min(1.0, rate / ssd.total)))
        found[WIRE] = ()
        return found


@dataclass(frozen=True)
class StepJob:
    """All that decides how an iteration runs."""

    shape: ModelShape
    plan: Plan
    settings: Settings
    rates: Rates
    update_bytes: tuple[int, ...]
    """By chunk: what an update of this rank's slice reads and writes."""
    captured: tuple[int, ...] = ()
    """By parameter: bytes of its gradient that are copied when it arrives; left out, gradients wait where autograd
    made them."""
    blocking: bool = False
    """The thread that issues the computation waits for each update on the host."""
    all_reduce: bool = False
    """Every rank has all of the model: gradients are summed over ranks."""
    lock_free: bool = False
    """Updates go on beside the passes, which wait for none."""
    exchanges: Mapping[int, int] = field(default_factory=dict)
    """By moment of the record: bytes that a rank sends to the others (experts' tokens)."""
    clip: bool = False
    """The norm is a barrier: with several ranks it waits for all reductions."""
    max_staleness: int = 1
    rounds: int = 1
    """In which ranks exchange the gradients of a chunk."""
