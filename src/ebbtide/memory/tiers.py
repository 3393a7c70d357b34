"""The tiers and the links between them, and the one place where what moves is counted."""

from __future__ import annotations

from dataclasses import dataclass, field

TIERS = ("device", "host", "ssd")
"""From the warmest to the coldest."""
TO_DEVICE, TO_HOST, SSD_READ, SSD_WRITE, WIRE = LINKS = (
    "host_to_device",
    "device_to_host",
    "ssd_read",
    "ssd_write",
    "wire",
)
"""The wire's bytes are those that this rank sends to others."""


@dataclass
class Traffic:
    """What was moved, over which link, since the beginning."""

    moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    """Bytes by link."""
    stalls: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    """Seconds that the host waited for a move, by link."""
    fetches: int = 0
    evictions: int = 0
    drops: int = 0

    def count(self, link: str, nbytes: int, chunk: int | None = None) -> None:
        """Every byte that moves comes through here; `chunk`: of which chunk it is, where it is of one."""
        self.moved[link] += nbytes
