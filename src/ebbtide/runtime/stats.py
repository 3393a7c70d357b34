"""What a session can say about itself: figures for users and for measurements."""

from __future__ import annotations

from typing import Any

from ebbtide.memory.disk.space import DiskSpace
from ebbtide.runtime.session import Session


def facts(session: Session, disk: DiskSpace | None) -> dict[str, Any]:
    ledger, traffic, cursor = session.ledger, session.store.traffic, session.cursor
    plan = cursor.plan
    return {
        "moved_bytes": dict(traffic.moved),
        "moved_by_chunk": traffic.by_chunk(),
        "fetches": traffic.fetches,
        "stall_seconds": dict(traffic.stalls),
        "offloaded_bytes": 0
        if session.parts.activations is None
        else session.parts.activations.offloaded_bytes,
        "evictions": traffic.evictions,
        "drops": traffic.drops,
        "held_bytes": dict(ledger.reserved),
        "peak_bytes": dict(ledger.peak),
        "budget_bytes": dict(ledger.budgets),
        "ssd": None if disk is None else _of_disk(disk),
        "lock_free": None if session.lock_free is None else session.lock_free.stats(),
        "experts": {one.layer.name: one.facts() for one in session.parts.dispatchers},
        "gathered_experts": session.parts.gathered_experts,
        "exchange_in_slices": session.sharing is not None and session.sharing.reductions.in_slices,
        "fixed_bytes": session.unmanaged.fixed_bytes(),
        "tags": {tier: dict(tags) for tier, tags in ledger.tag_peaks.items()},
        "traces": session.traces.count,
        "diverged": cursor.diverged,
        "symbolic": session.imagining.note,
        "device_state_chunks": session.store.state_homes.count("device"),
        "chunks": len(session.layout.chunks),
        "utilisation": session.layout.utilisation,
        "planned_traffic": plan.traffic if plan else None,
        "minimum_traffic": session.traces.least_traffic(plan.record) if plan else None,
        "least_device_bytes": plan.least if plan else None,
        "non_model_peak": session.traces.highest(),
    }


def _of_disk(disk: DiskSpace) -> dict[str, Any]:
    """What the disks did, for all engines that share them."""
    traffic = disk.traffic
    return {
        "files": list(disk.files),
        "direct": disk.direct,
        "stale_files_removed": disk.removed,
        "read_bytes": traffic.moved["ssd_read"],
        "write_bytes": traffic.moved["ssd_write"],
        "calls": sum(traffic.calls.values()),
        "busy_seconds": dict(traffic.busy),
    }
