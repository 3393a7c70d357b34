"""Small models of every kind that the promises are tested on, each with a batch that it learns from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)


@dataclass(frozen=True)
class Loss:
    """A dataclass output, as user code returns it."""

    loss: torch.Tensor
    extras: tuple[dict[str, torch.Tensor], ...]


class Attention(nn.Module):
    """nn.MultiheadAttention never calls its `out_proj`; the head reads the embedding's weight itself."""

    def __init__(self, width: int = 64, depth: int = 3, vocabulary: int = 512) -> None:
        super().__init__()
        self.checkpointing: bool | None = None
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "attend": nn.MultiheadAttention(width, 4, batch_first=True),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(depth)
        )
        self.scale = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def _block(self, block: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        y = block["norm"](x)
        x = x + block["attend"](y, y, y, need_weights=False)[0]
        return x + block["down"](torch.nn.functional.gelu(block["up"](x)))

    def forward(self, input_ids: torch.Tensor) -> Loss:
        x = self.embed(input_ids)
        for block in self.blocks:
            if self.checkpointing is None:
                x = self._block(block, x)
            else:
                x = torch.utils.checkpoint.checkpoint(self._block, block, x, use_reentrant=self.checkpointing)
        logits = torch.nn.functional.linear(x * self.scale, self.embed.weight)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten()
        )
        return Loss(loss, ({"logits": logits},))


def _tokens(vocabulary: int, step: int, batch: int = 2, length: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(4, vocabulary, (batch, length), generator=generator)


def _causal(vocabulary: int) -> Callable[[int], dict[str, Any]]:
    def batch(step: int) -> dict[str, Any]:
        ids = _tokens(vocabulary, step)
        return {"input_ids": ids, "labels": ids}

    return batch


def _image(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 10, (2,), generator=generator),
    }


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=512, n_positions=64, n_embd=64, n_layer=3, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, use_cache=False,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=512, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
            max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, image_size=32,
            patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Entry:
    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]


ZOO: dict[str, Entry] = {
    "gpt2": Entry(gpt2, _causal(512)),
    "llama": Entry(llama, _causal(512)),
    "bert": Entry(bert, _causal(512)),
    "t5": Entry(t5, _causal(512)),
    "vit": Entry(vit, _image),
    "attention": Entry(Attention, lambda step: {"input_ids": _tokens(512, step)}),
}


def cast(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def build(name: str, checkpointing: str = "none", seed: int = 0) -> nn.Module:
    """The model in fp32, the same every time. `checkpointing`: none, non-reentrant or reentrant."""
    torch.manual_seed(seed)
    model = ZOO[name].build()
    model.train()
    if checkpointing != "none":
        reentrant = checkpointing == "reentrant"
        if isinstance(model, Attention):
            model.checkpointing = reentrant
        else:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads() if hasattr(model, "get_input_embeddings") else None
    _built[model] = (name, checkpointing)
    return model


_built: WeakKeyDictionary[nn.Module, tuple[str, str]] = WeakKeyDictionary()


def built(module: nn.Module) -> tuple[str, str] | None:
    """Which of the zoo's models this is, and how it checkpoints."""
    return _built.get(module)


class Blocks(nn.Module):
    """Weights and their gradients decide what there is room for, not activations."""

    def __init__(self, depth: int, width: int, unused: bool = False) -> None:
        """`unused`: each block has a parameter that gets no gradient."""
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.up = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        for block in self.up if unused else ():
            block.register_parameter("unused", nn.Parameter(torch.zeros(width)))
        self.down = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for up, down, norm in zip(self.up, self.down, self.norms, strict=True):
            x = x + down(torch.relu(up(norm(x))))
        logits = self.head(x)[:, :-1].flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
