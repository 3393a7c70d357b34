"""18 billion parameters with clipping: that it trains on one card and its host."""

from __future__ import annotations

from budget_8b import measure
from results import Store
from shapes import LLAMA_18B, spec_for

QUESTION = "18B with clipping, three steps of 4k tokens, on one card and its host"


def run(store: Store, small: bool) -> None:
    budget, sizes = ("3MB", (128,)) if small else ("130GB", (4_096,))
    measure(store, spec_for(LLAMA_18B, small), budget, sizes, small)
