"""The models that are measured, by their published sizes, and a tiny one of the same kind for runs without a card."""

from __future__ import annotations

from typing import Any

import torch

from ebbtide.bench.steps import drawn_quickly
from ebbtide.models import ModelSpec, spec_of

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "use_cache": False,
}
QWEN_14B = {
    **LLAMA_8B,
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "vocab_size": 152064,
}
LLAMA_18B = {
    **LLAMA_8B,
    "hidden_size": 6144,
    "intermediate_size": 21504,
    "num_hidden_layers": 34,
    "num_attention_heads": 48,
}
TINY = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def spec_for(fields: dict[str, Any], small: bool) -> ModelSpec:
    return spec_of("tiny" if small else "model", TINY if small else fields)


def built(spec: ModelSpec) -> Any:
    """With numbers that are drawn quickly."""
    module = drawn_quickly(spec)
    module.train()
    return module


def batch_of(spec: ModelSpec, rows: int, length: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(0, spec.vocabulary, (rows, length), generator=drawn)
    return {"input_ids": ids, "labels": ids}
