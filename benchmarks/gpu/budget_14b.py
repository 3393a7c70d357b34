"""14 billion parameters of Qwen2.5's shape: more than the card or the host could hold by itself."""

from __future__ import annotations

from budget_8b import measure
from results import Store
from shapes import QWEN_14B, spec_for

QUESTION = "14B (Qwen2.5's shape) on one card and its host: seconds a step at 16k tokens, and its bound"


def run(store: Store, small: bool) -> None:
    spec = spec_for(QWEN_14B, small)
    # 14 bytes a parameter are 206 GB: the host has 128 GiB, so the card holds some of the state.
    budget, sizes = ("3MB", (256,)) if small else ("130GB", (16_384,))
    measure(store, spec, budget, sizes, small)
