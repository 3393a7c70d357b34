"""The imagined iteration against the real one, architecture by architecture: the same events, and the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import ebbtide
from ebbtide.planner.record import Record
from harness import config_of
from sampling import crossed

IMAGINES = True

VOCAB, WIDTH, INNER, BATCH, LENGTH = 1024, 128, 256, 4, 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": INNER,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": WIDTH,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "use_cache": False,
}
T5_LIKE: dict[str, Any] = {
    **SEQ2SEQ, "d_kv": 32, "d_ff": INNER, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
}  # fmt: skip


def switch(**changes: Any) -> nn.Module:
    sparse = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    config = SwitchTransformersConfig(**{**T5_LIKE, **sparse, "router_jitter_noise": 0.0, **changes})
    return SwitchTransformersForConditionalGeneration(config)


def mixtral(**changes: Any) -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=4, **changes))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=4, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=2)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**COMMON, num_key_value_heads=2)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON, num_key_value_heads=2)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON)),
    "falcon": lambda: FalconForCausalLM(
        FalconConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, use_cache=False,
            hidden_dropout=0.0, attention_dropout=0.0,
        )
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, ffn_dim=INNER, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=LENGTH, word_embed_proj_dim=WIDTH, dropout=0.0, use_cache=False,
        )
    ),
    "mixtral": mixtral,
    "bert": lambda: BertForMaskedLM(BertConfig(**COMMON, **STILL)),
    "vit": lambda: ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=INNER, image_size=64,
            patch_size=8, num_labels=10, **STILL,
        )
    ),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5_LIKE)),
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(
            **SEQ2SEQ, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, max_position_embeddings=LENGTH, dropout=0.0,
        )
    ),
}  # fmt: skip


def batch(name: str, step: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    if name == "vit":
        pixels = torch.randn(BATCH, 3, 64, 64, generator=generator).bfloat16()
        return {"pixel_values": pixels, "labels": torch.randint(0, 10, (BATCH,), generator=generator)}
    ids = torch.randint(4, VOCAB, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def build(make: Callable[[], nn.Module], checkpointing: bool) -> nn.Module:
    torch.manual_seed(0)
    module = make().train()
    if checkpointing:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return module


def live_record(name: str, module: nn.Module, keep_outputs: bool = False) -> Record:
    """Of the first iteration, in which nothing of an iteration before is alive."""
    engine = ebbtide.initialize(module, config_of(device={"memory": "1GB"}, poison=False))
    try:
        given = batch(name)  # held through backward, as a loop holds it
        out = engine(**given)
        loss = out.loss
        if not keep_outputs:
            del out
        engine.backward(loss)
        assert engine._session.recording.last is not None
        return engine._session.recording.last
    finally:
        engine.close()


def imagined_record(
    name: str, make: Callable[[], nn.Module], checkpointing: bool, keep_outputs: bool = False
) -> Record:
    """From the meta device: shapes are all there is to know."""
    with torch.device("meta"):
        module = build(make, checkpointing)
    given = batch(name)
    meta = {id(value): value.to("meta") for value in given.values()}
    trace = ebbtide.trace(
        module, {key: meta[id(value)] for key, value in given.items()}, torch.bfloat16, keep_outputs
    )
    assert trace.note == ""
    return trace.record


@pytest.mark.parametrize(("name", "checkpointing"), crossed(FAMILIES, [False, True]))
def test_the_imagined_iteration_is_the_real_one(name: str, checkpointing: bool) -> None:
    live = live_record(name, build(FAMILIES[name], checkpointing))
    imagined = imagined_record(name, FAMILIES[name], checkpointing)
    assert [m.event for m in imagined.moments] == [m.event for m in live.moments]
    assert imagined.accesses == live.accesses and imagined.arrivals == live.arrivals
    assert imagined.flops == live.flops and imagined.forward == live.forward >= 0
    for one, other in zip(imagined.moments, live.moments, strict=True):
        assert abs(one.peak - other.peak) <= max(0.02 * other.peak, 4096)
    # The loss and what hangs on its graph: leaves that forward made, with their gradients.
    assert abs(imagined.between - live.between) <= 4096


def test_outputs_that_a_loop_holds_are_counted() -> None:
    make = FAMILIES["gpt2"]
    live = live_record("gpt2", build(make, False), keep_outputs=True)
    imagined = imagined_record("gpt2", make, False, keep_outputs=True)
    for one, other in zip(imagined.moments, live.moments, strict=True):
        assert abs(one.peak - other.peak) <= max(0.02 * other.peak, 4096)
    assert imagined.between == live.between
    logits = BATCH * LENGTH * VOCAB * 2
    assert imagined.peak - imagined_record("gpt2", make, False).peak == pytest.approx(logits, rel=0.01)


@pytest.mark.parametrize(
    ("make", "checkpointing"),
    crossed([switch, lambda: mixtral(experts_implementation="eager")], [False, True]),
)
def test_experts_that_are_routed_by_value(make: Callable[[], nn.Module], checkpointing: bool) -> None:
    """The real load of an untrained router is uneven: the same events, and bytes that differ by as much."""
    live = live_record("experts", build(make, checkpointing))
    imagined = imagined_record("experts", make, checkpointing)
    assert [m.event for m in imagined.moments] == [m.event for m in live.moments]
    assert imagined.accesses == live.accesses and imagined.arrivals == live.arrivals
    assert imagined.flops == pytest.approx(live.flops, rel=0.01)
    assert imagined.peak == pytest.approx(live.peak, rel=0.02)
    for one, other in zip(imagined.moments, live.moments, strict=True):
        assert abs(one.peak - other.peak) <= max(0.02 * other.peak, 512 << 10)
