"""The same work by others, beside `peers_8b`: ZeRO-2 offload, ZeRO-3 with part of its updates on the card, torchao."""

from __future__ import annotations

from typing import Any

from peers_8b import compare
from results import Store

QUESTION = (
    "8B at 16k tokens a step: DeepSpeed's ZeRO-2 offload and `ratio`, torchao's offloaded and 8-bit AdamW"
)
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero-3 offload, ratio 0.7": ("deepspeed_zero", {"stage": 3, "parameters": True, "ratio": 0.7}),
    "torchao 8-bit in backward": ("torchao_optimizers", {"kind": "8-bit", "compiled": True}),
    "torchao offload": ("torchao_optimizers", {"kind": "offload", "compiled": True}),
    "zero-2 offload": ("deepspeed_zero", {"stage": 2}),
}


def run(store: Store, small: bool) -> None:
    compare(store, PEERS, small)
