"""Models by name, as the fields of their Hugging Face config.

No dropout, so that a run says something about placement and not about random numbers. Token ids are set
where the library's defaults lie outside a byte vocabulary; 256, where there is one, pads, starts or masks.
"""

from __future__ import annotations

from typing import Any

MARK = 256
"""The token beside the 256 bytes: it masks (BERT), and starts and pads (T5)."""


def gpt2(
    layers: int,
    width: int,
    heads: int,
    vocabulary: int = 50_257,
    ffn: int | None = None,
    positions: int = 1024,
) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_inner": ffn,
        "vocab_size": vocabulary,
        "n_positions": positions,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-tiny": gpt2(6, 256, 4, 256),
    "gpt2-124m": gpt2(12, 768, 12, 50_257),
    "gpt2-350m": gpt2(24, 1024, 16, 50_257),
    "gpt2-1b": gpt2(20, 2048, 16, 50_257),
    "llama-tiny": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "bert-tiny": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "vocab_size": 257,
        "max_position_embeddings": 1024,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": None,
    },
    "t5-tiny": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "num_layers": 3,
        "num_decoder_layers": 3,
        "d_model": 256,
        "d_kv": 64,
        "d_ff": 1024,
        "num_heads": 4,
        "vocab_size": 257,
        "dropout_rate": 0.0,
        "pad_token_id": MARK,
        "decoder_start_token_id": MARK,
        "eos_token_id": None,
    },
    "vit-tiny": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 4,
        "num_labels": 10,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
