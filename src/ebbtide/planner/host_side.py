"""What the host holds of what the device does not, and what goes to SSD because the host is too small.

Parameters and gradients of chunks that the host updates come first: they cross the link in every iteration. Then
optimizer state, in the model's order: forward wants the first chunks first, and meanwhile the state of others can be
read. Updates in backward want an even stream (`filling_order`). The rest is streamed from SSD and back; where the
device is RAM beside SSD, one chunk that does not fit as a whole (often a tied embedding) keeps its first pieces.
Parameters go to SSD only where gradients and the rest leave them no room. The host takes a page as a whole, which
neighbours may share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ebbtide.planner.shape import ModelShape, Settings
from ebbtide.planner.sizes import lock_free_bytes, pieces_within, slot_bytes, stage_bytes, stored_bytes


class Paged:
    """Copies of one kind on the host. Where chunks are stored as they are, each takes its own bytes."""

    def __init__(self, shape: ModelShape, counts: Sequence[int]) -> None:
        """`counts`: bytes of each chunk's copy."""
        self._shape, self._counts = shape, counts
        self._users: Counter[int] = Counter()
        """Chunks by page."""

    def put(self, chunk: int) -> int:
        """A copy is there; the bytes it takes beside those before it."""
        if not self._shape.pages or not self._counts[chunk]:
            return self._counts[chunk]
        pages = self._shape.pages[chunk]
        new = sum(not self._users[page] for page in pages)
        self._users.update(pages)
        return new * self._page(chunk)

    def take(self, chunk: int) -> int:
        """A copy that is there goes; the bytes that become free."""
        if not self._shape.pages or not self._counts[chunk]:
            return self._counts[chunk]
        pages = self._shape.pages[chunk]
        self._users.subtract(pages)
        return sum(not self._users[page] for page in pages) * self._page(chunk)

    def _page(self, chunk: int) -> int:
        """Bytes of a page of this kind, as wide as the copy beside the parameters."""
        return self._shape.page_bytes[chunk] * self._counts[chunk] // self._shape.parameter_bytes[chunk]


def on_host(shape: ModelShape, chunks: Iterable[int], counts: Sequence[int]) -> int:
    """Bytes that copies of these chunks take together."""
    copies = Paged(shape, counts)
    return sum(copies.put(chunk) for chunk in chunks)


TRANSIT = 2
"""Of the largest chunk's parameters: room on the host for those that pass through it."""


@dataclass(frozen=True)
class HostSide:
    keep: bool
    """Every parameter chunk that comes to the device keeps its host copy."""
    ssd: frozenset[int]
    """Chunks whose optimizer state lives on SSD."""
    ssd_parameters: frozenset[int]
    host_bytes: int
    ssd_bytes: int
    short: int = 0
    """Bytes that fit neither tier."""
    tier: str = "host"
    """The tier that is short."""
    kept: Mapping[int, int] = field(default_factory=dict)
    """By chunk whose state is on SSD: how many of its first pieces stay in RAM, and do not stream."""

    def streamed(self, shape: ModelShape, chunk: int) -> int:
        """Bytes of a chunk's state that an update reads from SSD and writes."""
        return streamed_state(shape, chunk, self.kept) if chunk in self.ssd else 0


def streamed_state(shape: ModelShape, chunk: int, kept: Mapping[int, int]) -> int:
    """Bytes of state that stream, of a chunk on SSD with so many pieces in RAM."""
    return max(0, shape.state_bytes[chunk] - kept.get(chunk, 0) * shape.piece)


def beside_updates(shape: ModelShape, away: Iterable[int], settings: Settings, on_ssd: Iterable[int]) -> int:
    """Bytes of all buffers of updates beside the computation, on the tier where they run. `away`: the chunks that are
    not updated on the device, `on_ssd`: those whose state streams."""
    chunks = [i for i in away if shape.state_bytes[i]]
    parameters = [shape.parameter_bytes[i] for i in chunks]
    gradients = [shape.gradient_bytes[i] for i in chunks]
    found = stage_bytes([shape.state_bytes[i] for i in on_ssd], shape.piece)
    if settings.lock_free:
        found += sum(lock_free_bytes(parameters, gradients, settings.waiting_width))
    return found


def kept_bytes(shape: ModelShape, kept: Mapping[int, int]) -> int:
    """Bytes of RAM for pieces that stay there."""
    return sum(count * slot_bytes([shape.state_bytes[i]], shape.piece) for i, count in kept.items())


def fill_host(
    shape: ModelShape, device: frozenset[int], settings: Settings, kept: Mapping[int, int] | None = None
) -> HostSide:
    """`device`: the chunks whose optimizer state lives on the device. `kept`: pieces of others that are there, where the
    device is RAM."""
    away = [i for i, count in enumerate(shape.state_bytes) if count and i not in device]
    if settings.ssd_beside_device:
        return _on_ssd(shape, away, settings, kept or {})
    grads = waiting_gradients(shape, away, settings)
    params = 0 if settings.returned else on_host(shape, away, shape.parameter_bytes)
    states = on_host(shape, away, shape.state_bytes)
    every = on_host(shape, range(shape.chunks), shape.parameter_bytes)
    copies = every - params if settings.placement != "static" else 0
    needed = grads + params + states + beside_updates(shape, away, settings, ())
    for keep, count in ((True, needed + copies), (False, needed)):
        if count <= settings.host:
            return HostSide(keep, frozenset(), frozenset(), count, 0)
    if not settings.ssd:
        return HostSide(False, frozenset(), frozenset(), settings.host, 0, needed - settings.host)
    return _with_ssd(shape, away, grads, params, settings)


def waiting_gradients(shape: ModelShape, away: Iterable[int], settings: Settings) -> int:
    """Bytes of gradients that wait on the host: all of them for an update after backward, a few for one in backward,
    none where they lie in their parameters' space."""
    if settings.in_parameter_space:
        return 0
    if settings.in_backward:
        return 2 * largest_on_host(shape, away, shape.gradient_bytes)
    return on_host(shape, away, shape.gradient_bytes)


def largest_on_host(shape: ModelShape, chunks: Iterable[int], counts: Sequence[int]) -> int:
    """Bytes that the largest copy takes on the host."""
    return max((on_host(shape, (i,), counts) for i in chunks), default=0)


def _on_ssd(shape: ModelShape, away: list[int], settings: Settings, kept: Mapping[int, int]) -> HostSide:
    """There is no host: all state that is not on the device is on SSD, where all of it has a place."""
    stored = sum(stored_bytes(shape.state_bytes[i], shape.piece) for i in away)
    short = max(0, stored - settings.ssd)
    return _streaming(shape, HostSide(False, frozenset(away), frozenset(), 0, 0, short, "ssd", kept))


def _streaming(shape: ModelShape, host: HostSide) -> HostSide:
    """Counts what streams of it."""
    return replace(host, ssd_bytes=host.ssd_bytes + sum(host.streamed(shape, i) for i in host.ssd))


def _with_ssd(shape: ModelShape, away: list[int], grads: int, params: int, settings: Settings) -> HostSide:
    left = settings.host - beside_updates(shape, away, settings, away) - grads - params
    held_params: list[int] = []
    copies = Paged(shape, shape.parameter_bytes)
    if left < 0:
        left -= TRANSIT * largest_on_host(shape, away, shape.parameter_bytes)
        for i in away:
            copies.put(i)
    for i in reversed(away):
        if left >= 0:
            break
        left += copies.take(i)
        held_params.append(i)
    if left < 0:
        return HostSide(False, frozenset(), frozenset(), settings.host, 0, -left)
    states = Paged(shape, shape.state_bytes)
    on_ssd = []
    for i in filling_order(away, settings):
        count = states.put(i)
        if count <= left:
            left -= count
        else:
            states.take(i)
            on_ssd.append(i)
    ssd = frozenset(on_ssd)
    loaded = [shape.parameter_bytes[i] for i in held_params]
    stored = [*(shape.state_bytes[i] for i in ssd), *loaded]
    short = max(0, sum(stored_bytes(count, shape.piece) for count in stored) - settings.ssd)
    host = settings.host - left
    found = HostSide(False, ssd, frozenset(held_params), host, sum(loaded), short, "ssd")
    return _streaming(shape, found)


def filling_order(chunks: Iterable[int], settings: Settings) -> list[int]:
    """The order in which chunks' state gets room beside SSD, where there is not enough for all. In backward gradients
    wait for a disk that falls behind, and have the least room at its beginning: so of any number that stream, some come
    at every time, as evenly as halving puts them. The first chunk's update comes last, and forward waits for it."""
    order = list(chunks)
    if not settings.in_backward or len(order) < 3:
        return order
    rest = order[1:]
    bits = (len(rest) - 1).bit_length()
    halving = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return order[:1] + [rest[place] for place in halving if place < len(rest)]


def fill(
    shape: ModelShape, chunks: Iterable[int], room: int, split: bool = True
) -> tuple[frozenset[int], dict[int, int]]:
    """The chunks whose state fits `room` bytes, in the order given, and with `split` pieces of the first that does
    not."""
    whole: list[int] = []
    kept: dict[int, int] = {}
    for i in chunks:
        state = shape.state_bytes[i]
        if state and state <= room:
            room -= state
            whole.append(i)
        elif split and not kept and (count := pieces_within(room, state, shape.piece)):
            kept[i] = count
            room -= kept_bytes(shape, kept)
    return frozenset(whole), kept
