"""A run's recorded steps in the trace format of Chrome and Perfetto: ui.perfetto.dev opens the file.

Each step of each rank is a process: a track for the moments, one for each lane, counters for the tiers, and arrows from
a chunk's arrival to the first moment that uses it.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbtide.errors import ConfigError
from ebbtide.report.causes import CAUSES, LANES
from ebbtide.report.plain_files import finite, replace
from ebbtide.report.run_files import RunFiles

MOMENTS = "moments"
TRACKS = (MOMENTS, *LANES)
ARRIVING = ("host_to_device", "ssd_read", "wire")
"""Links over which a chunk comes to be used."""
Row = dict[str, Any]


def write_trace(run: RunFiles, path: Path) -> dict[str, int]:
    """Gives how many events of each phase the file has."""
    events = list(trace_events(run))
    text = json.dumps(
        finite({"displayTimeUnit": "ms", "traceEvents": events}), separators=(",", ":")
    ).encode()
    try:
        replace(path, gzip.compress(text, 6, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise ConfigError(
            f"--perfetto: {str(path)!r} cannot be written ({error.strerror}); name another file"
        ) from None
    found: dict[str, int] = defaultdict(int)
    for event in events:
        found[event["ph"]] += 1
    return dict(found)


def trace_events(run: RunFiles) -> Iterator[Row]:
    process = 0
    for one in run.everyone:
        names = one.facts.get("model") or run.facts.get("model", {})
        for step in one.recorded:
            process += 1
            yield from _Process(process, one.rank, step, names).events()


class _Process:
    """One recorded step."""

    def __init__(self, number: int, rank: int, step: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        self.number, self.rank, self.step, self.names = number, rank, step, names

    def events(self) -> Iterator[Row]:
        yield from self._headers()
        yield from self._moments()
        yield from self._thread()
        yield from self._beside()
        yield from self._counters()
        yield from self._arrows()

    def _headers(self) -> Iterator[Row]:
        title = f"step {self.step['step']}, rank {self.rank}"
        yield {"ph": "M", "name": "process_name", "pid": self.number, "tid": 0, "args": {"name": title}}
        for place, track in enumerate(TRACKS):
            shown = LANES.get(track, track)
            base = {"ph": "M", "pid": self.number, "tid": place}
            yield {**base, "name": "thread_name", "args": {"name": shown}}
            yield {**base, "name": "thread_sort_index", "args": {"sort_index": place}}

    def _slice(self, track: str, name: str, begin: float, end: float, **facts: Any) -> Row:
        return {
            "ph": "X",
            "cat": "ebbtide",
            "name": name,
            "pid": self.number,
            "tid": TRACKS.index(track),
            "ts": _micro(begin),
            "dur": max(0.0, _micro(end) - _micro(begin)),
            "args": facts,
        }

    def _moments(self) -> Iterator[Row]:
        rows = self.step["moments"]
        for place, (begin, phase, subject, position) in enumerate(rows):
            end = rows[place + 1][0] if place + 1 < len(rows) else self.step["seconds"]
            yield self._slice(MOMENTS, self._name(phase, subject), begin, end, moment=place, of_plan=position)

    def _name(self, phase: str, subject: int) -> str:
        lists = {"forward": "units", "backward": "runs", "gradient": "tensors"}
        found = self.names.get(lists.get(phase, ""), [])
        if phase == "update" or subject >= len(found):
            return f"{phase} of {'chunk' if phase == 'update' else 'number'} {subject}"
        return f"{phase} of {found[subject] or 'the model'}"

    def _thread(self) -> Iterator[Row]:
        for cause, begin, end, depth, chunk in self.step["spans"]:
            name = CAUSES[cause].name if cause in CAUSES else cause
            yield self._slice("thread", name, begin, end, depth=depth, chunk=chunk)

    def _beside(self) -> Iterator[Row]:
        for chunk, tier, begin, end, beside in self.step["updates"]:
            if beside:  # else it is on the thread's own track
                yield self._slice("updates", f"chunk {chunk} on {tier}", begin, end, chunk=chunk)
        for link, chunk, kind, nbytes, issued, begin, end in self.step["moves"]:
            name = kind if chunk is None else f"{kind} {chunk}"
            facts = {"chunk": chunk, "bytes": nbytes, "issued_us": _micro(issued)}
            if begin is None or end is None:
                yield self._slice(link, f"{name} (its end was not seen)", issued, issued, **facts)
            else:
                yield self._slice(link, name, begin, end, **facts)

    def _counters(self) -> Iterator[Row]:
        for begin, tier, tags, non_model in self.step["levels"]:
            held = {**tags, "non-model": non_model} if non_model else dict(tags)
            yield {
                "ph": "C",
                "name": f"{tier}, bytes",
                "pid": self.number,
                "tid": 0,
                "ts": _micro(begin),
                "args": held or {"param": 0},
            }

    def _arrows(self) -> Iterator[Row]:
        uses = self._uses()
        for place, (link, chunk, _, _, _, begin, end) in enumerate(self.step["moves"]):
            if link not in ARRIVING or end is None or chunk not in uses:
                continue
            later = bisect_left(uses[chunk], begin)
            if later == len(uses[chunk]):
                continue
            base = {"cat": "ebbtide", "name": "fetched", "id": f"{self.number}.{place}", "pid": self.number}
            last = min(_micro(end), max(_micro(begin), _micro(end) - 0.001))
            yield {**base, "ph": "s", "tid": TRACKS.index(link), "ts": last}
            used = max(last, _micro(uses[chunk][later]))
            yield {**base, "ph": "f", "bp": "e", "tid": TRACKS.index(MOMENTS), "ts": used}

    def _uses(self) -> dict[int, list[float]]:
        """By chunk, the beginnings of the moments that compute with it."""
        lists = {"forward": "unit_chunks", "backward": "run_chunks"}
        found: dict[int, list[float]] = defaultdict(list)
        for begin, phase, subject, _ in self.step["moments"]:
            chunks: Sequence[Sequence[int]] = self.names.get(lists.get(phase, ""), [])
            for chunk in chunks[subject] if subject < len(chunks) else ():
                found[chunk].append(begin)
        return found


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)
