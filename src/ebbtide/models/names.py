"""Models by a name that says their shape: families from the papers, and any other spelled out.

`gpt-10b` is one of PatrickStar's sizes, `angel-t5-27b` one of Angel-PTM's; `gpt:layers=78,hidden=4096` spells a GPT,
and `t5:`, `llama:` and `bert:` theirs. A T5 with `experts=` is a Switch Transformer whose every other layer, in the
encoder and the decoder, has that many experts; no token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebbtide.errors import ConfigError, nearest
from ebbtide.models.presets import MARK, gpt2

Fields = dict[str, Any]

PATRICKSTAR = {
    "1b": (20, 2048), "2b": (40, 2048), "4b": (64, 2304), "6b": (53, 3072), "8b": (72, 3072), "10b": (50, 4096),
    "12b": (60, 4096), "15b": (78, 4096), "18b": (90, 4096), "20b": (25, 8192), "30b": (37, 8192), "40b": (50, 8192),
    "50b": (62, 8192), "60b": (75, 8192), "68b": (66, 9216),
}  # fmt: skip
"""Layers and width of the GPT family in PatrickStar's evaluation; 16 heads, 1024 positions."""

ANGEL_GPT = {
    "1.7b": (24, 24, 2304, 9216), "13b": (40, 40, 5120, 20480), "28b": (26, 128, 8192, 32768),
    "30b": (36, 64, 8192, 32768), "55b": (68, 128, 8192, 32768), "120b": (64, 96, 12288, 49152),
    "175b": (70, 112, 14336, 57344),
}  # fmt: skip
"""Layers, heads, width and inner width of Angel-PTM's GPT models; 2048 positions."""
ANGEL_T5 = {"1.4b": (16, 16, 1024, 16384), "27b": (28, 64, 4096, 16384), "58b": (60, 64, 4096, 16384)}
ANGEL_MOE = {"1.2t": (16, 16, 1024, 16384, 2304)}

NAMES: tuple[str, ...] = (
    *(f"gpt-{size}" for size in PATRICKSTAR),
    *(f"angel-gpt-{size}" for size in ANGEL_GPT),
    *(f"angel-t5-{size}" for size in ANGEL_T5),
    *(f"angel-t5-moe-{size}" for size in ANGEL_MOE),
)
SUMMARY = (
    "gpt-1b to gpt-68b, angel-gpt-1.7b to -175b, angel-t5-1.4b to -58b, angel-t5-moe-1.2t, or one spelled as "
    "gpt:layers=24,hidden=1024 (t5, llama and bert alike)"
)
"""All of them, short enough for a message."""


def fields_of(name: str) -> Fields | None:
    """The fields of a Hugging Face config; None where the name is not of this kind."""
    kind, colon, spelled = name.partition(":")
    if colon and (kind in FAMILIES or "=" in spelled):
        return _spelled(name, kind, spelled)
    family, _, size = name.rpartition("-")
    if family == "gpt" and size in PATRICKSTAR:
        layers, width = PATRICKSTAR[size]
        return gpt2(layers, width, 16)
    if family == "angel-gpt" and size in ANGEL_GPT:
        layers, heads, width, ffn = ANGEL_GPT[size]
        return gpt2(layers, width, heads, ffn=ffn, positions=2048)
    if family == "angel-t5" and size in ANGEL_T5:
        layers, heads, width, ffn = ANGEL_T5[size]
        return t5(layers, width, heads, ffn)
    if family == "angel-t5-moe" and size in ANGEL_MOE:
        layers, heads, width, ffn, experts = ANGEL_MOE[size]
        return t5(layers, width, heads, ffn, experts=experts)
    return None


# -- configs ---------------------------------------------------------------------------------------


def t5(
    layers: int,
    width: int,
    heads: int,
    ffn: int,
    vocab: int = 32_128,
    kv: int | None = None,
    experts: int = 0,
) -> Fields:
    """As many layers in the encoder as in the decoder."""
    fields = {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "num_layers": layers,
        "num_decoder_layers": layers,
        "d_model": width,
        "d_kv": kv or width // heads,
        "d_ff": ffn,
        "num_heads": heads,
        "vocab_size": vocab,
        "dropout_rate": 0.0,
        "pad_token_id": MARK,
        "decoder_start_token_id": MARK,
        "eos_token_id": None,
    }
    if not experts:
        return fields
    return fields | {
        "model_type": "switch_transformers",
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "num_experts": experts,
        "num_sparse_encoder_layers": layers // 2,
        "num_sparse_decoder_layers": layers // 2,
        # The library divides layers by sparse layers, which is every third of three.
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "expert_capacity": 1 << 30,
        "router_jitter_noise": 0.0,
    }


def llama(
    layers: int, width: int, heads: int, ffn: int, vocab: int, positions: int, kv_heads: int | None = None
) -> Fields:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def bert(layers: int, width: int, heads: int, ffn: int, vocab: int, positions: int) -> Fields:
    return {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": None,
    }


# -- spelled ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How a kind of model is spelled: keys beside layers, hidden, heads and ffn, with their defaults."""

    defaults: dict[str, int | None]
    build: Callable[[dict[str, Any]], Fields]


def _shape(values: dict[str, Any]) -> tuple[int, int, int, int]:
    return values["layers"], values["hidden"], values["heads"], values["ffn"]


FAMILIES: dict[str, Family] = {
    "gpt": Family(
        {"vocab": 50_257, "positions": 1024},
        lambda v: gpt2(v["layers"], v["hidden"], v["heads"], v["vocab"], v["ffn"], v["positions"]),
    ),
    "t5": Family(
        {"vocab": 32_128, "kv": None, "experts": 0},
        lambda v: t5(*_shape(v), v["vocab"], v["kv"], v["experts"]),
    ),
    "llama": Family(
        {"vocab": 32_000, "positions": 4096, "kv_heads": None},
        lambda v: llama(*_shape(v), v["vocab"], v["positions"], v["kv_heads"]),
    ),
    "bert": Family(
        {"vocab": 30_522, "positions": 1024}, lambda v: bert(*_shape(v), v["vocab"], v["positions"])
    ),
}
RANGES = {
    "layers": (1, 10_000), "hidden": (1, 1_000_000), "heads": (1, 10_000), "ffn": (1, 10_000_000),
    "vocab": (MARK + 1, 10_000_000), "positions": (2, 100_000_000), "kv": (1, 100_000), "kv_heads": (1, 10_000),
    "experts": (1, 1_000_000),
}  # fmt: skip


def _spelled(name: str, kind: str, text: str) -> Fields:
    if kind not in FAMILIES:
        hint = nearest(kind, FAMILIES) or f"; expected one of {', '.join(FAMILIES)}"
        raise ConfigError(f"model {name!r}: unknown family {kind!r}{hint}")
    family = FAMILIES[kind]
    keys = ["layers", "hidden", "heads", "ffn", *family.defaults]
    given: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in keys:
            hint = nearest(key, keys) or f"; expected {', '.join(keys)}"
            raise ConfigError(f"model {name!r}: unknown key {key!r}{hint}")
        if key in given:
            raise ConfigError(f"model {name!r}: {key} is given twice")
        given[key] = _number(name, key, value)
    for key in ("layers", "hidden"):
        if key not in given:
            raise ConfigError(f"model {name!r}: {key} is missing, as in {kind}:layers=24,hidden=1024")
    values = family.defaults | given
    values.setdefault("heads", next(n for n in range(16, 0, -1) if given["hidden"] % n == 0))
    values.setdefault("ffn", 4 * given["hidden"])
    _agree(name, kind, values)
    return family.build(values)


def _number(name: str, key: str, text: str) -> int:
    least, most = RANGES[key]
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and least <= int(text) <= most):
        raise ConfigError(
            f"model {name!r}: {key}: expected a whole number from {least} to {most}, found {text!r}"
        )
    return int(text)


def _agree(name: str, kind: str, values: dict[str, Any]) -> None:
    """What the numbers must be to each other."""
    hidden, heads = values["hidden"], values["heads"]
    if hidden % heads and not values.get("kv"):
        raise ConfigError(
            f"model {name!r}: hidden: expected a multiple of heads ({heads}), found {hidden}; "
            f"the next one is {hidden + -hidden % heads}"
        )
    if kind == "llama" and hidden // heads % 2:
        raise ConfigError(
            f"model {name!r}: heads: rotary positions need an even width of a head, found {hidden // heads}; "
            "change hidden or heads"
        )
    if heads % (values.get("kv_heads") or 1):
        raise ConfigError(
            f"model {name!r}: kv_heads: expected a divisor of heads ({heads}), found {values['kv_heads']}"
        )
    if values.get("experts") and values["layers"] < 2:
        raise ConfigError(
            f"model {name!r}: layers: every other layer has experts, so it takes 2 or more, found 1"
        )
