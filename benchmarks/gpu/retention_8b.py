"""How much of the resident speed a budget keeps, by tokens a step: from a few thousand on the update is hidden."""

from __future__ import annotations

from typing import Any

from budget_8b import steps
from ceilings import device_of
from results import Store
from shapes import LLAMA_8B, batch_of, spec_for

QUESTION = "8B: tokens a second under 24 GB over tokens a second resident, from 2k to 128k tokens a step"
TOKENS = (16_384, 2_048, 65_536, 4_096, 131_072, 8_192, 32_768)
MOST = 16_384


def run(store: Store, small: bool) -> None:
    spec, device = spec_for(LLAMA_8B, small), device_of(small)
    resident: dict[int, float] = {}
    length = 64 if small else 4096

    def of(tokens: int, budget: str) -> dict[str, Any]:
        passes = max(1, tokens // (256 if small else MOST))
        per_pass = tokens // passes
        batch = batch_of(spec, max(1, per_pass // length), min(length, per_pass))
        return steps(store, spec, batch, passes, tokens, budget, {}, device)

    for tokens in (128, 256) if small else TOKENS:
        whole = store.part(f"{tokens} resident", lambda tokens=tokens: of(tokens, "auto"), needs=60)
        resident[tokens] = whole.get("tokens_per_second", 0.0)
        tight = store.part(
            f"{tokens} budget", lambda tokens=tokens: of(tokens, "3MB" if small else "24GB"), needs=60
        )
        if resident[tokens] and tight.get("tokens_per_second"):
            kept = tight["tokens_per_second"] / resident[tokens]
            store.part(f"{tokens} kept", lambda kept=kept: {"share": kept}, needs=0)
