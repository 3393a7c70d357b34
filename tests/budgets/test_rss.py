"""What a model of a billion parameters takes of the machine's memory, with everything resident."""

from typing import Any

import psutil
import pytest

from ebbtide.bench.ssd_steps import peak_rss
from ebbtide.bench.steps import Ours, alone, tokens
from ebbtide.devices.heap import tune_memory
from ebbtide.models import find_model

MODEL, BATCH, SEQ, STEPS = "gpt2-1b", 2, 256, 4


def _train(config: dict[str, Any]) -> dict[str, int]:
    """From meta tensors, as `ebbtide train` has it: what the engine holds is all that there ever is."""
    ours = Ours(MODEL, tokens(MODEL, BATCH, SEQ), config, module=find_model(MODEL).on_meta())
    tune_memory(scarce=False)
    try:
        for _ in range(STEPS):
            ours.step()
        return {
            "peak_rss": peak_rss(),
            "parameters": sum(place.numel for place in ours.engine._session.data.places),
            "non_model": ours.engine.stats()["non_model_peak"],
        }
    finally:
        ours.close()


@pytest.mark.heavy
@pytest.mark.skipif(psutil.virtual_memory().total < 22 << 30, reason="needs 22 GiB of RAM")
@pytest.mark.parametrize(("updates", "bytes_each"), [("exact", 14.5), ("in-backward", 12.5)])
def test_a_billion_parameters_take_their_bytes(updates: str, bytes_each: float) -> None:
    """What the table of bytes says, activations, and 0.7 GB for Python, torch and what memory is in pieces."""
    found = alone(_train, {"precision": "bf16", "updates": updates, "clip": None})
    print(found)
    assert found["peak_rss"] <= bytes_each * found["parameters"] + found["non_model"] + 0.7e9, found
