"""What a loop may ask for its whole process, which an engine does not change by itself."""

from __future__ import annotations

from ebbtide.devices import heap
from ebbtide.engine.training import Engine


def tune_memory(engine: Engine) -> None:
    """On a CPU: torch's large tensors and the engine's chunks share one pool of memory from here on (where there is a
    compiler; else the heap keeps what is freed, or gives it back in a run with SSD). Steps are faster, up to a quarter,
    and the process takes less. Once, after `initialize`."""
    heap.tune_memory(scarce=bool(engine.config.ssd.memory))  # RAM is short, else there would be no disk
