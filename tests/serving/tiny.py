# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama and a random EAGLE-3 head for it, written as Hugging Face folders.

Random weights are enough to compare two ways of decoding the same model, and a few layers
make hundreds of steps a second. The head's guesses are worth nothing: the oracle drafter
(``oracle.py``) supplies candidates that are accepted."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 384
HIDDEN = 128
LAYERS = 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
FFN = 192
DRAFT_VOCAB = 256
MAX_POSITIONS = 2048

_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_target(folder: Path, seed: int = 0) -> Path:
    """Write the target model to ``folder``."""
    gen = torch.Generator().manual_seed(seed)
    weights = {"model.embed_tokens.weight": _normal(gen, VOCAB, HIDDEN, scale=1.0)}
    for layer in range(LAYERS):
        weights |= _block(gen, f"model.layers.{layer}.", HIDDEN)
        weights[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"model.layers.{layer}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    # Logits with a spread of several units: near ties would compare rounding, not decoding.
    weights["lm_head.weight"] = _normal(gen, VOCAB, HIDDEN, scale=0.35)
    config = _COMMON | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
    }
    return _write(folder, config, weights)


def make_head(folder: Path, seed: int = 1) -> Path:
    """Write the EAGLE-3 head to ``folder``: reduced vocabulary, embeddings shared."""
    gen = torch.Generator().manual_seed(seed)
    weights = _block(gen, "midlayer.", 2 * HIDDEN)
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        weights[f"midlayer.{norm}.weight"] = torch.ones(HIDDEN)
    weights["fc.weight"] = _normal(gen, HIDDEN, 3 * HIDDEN)
    weights["norm.weight"] = torch.ones(HIDDEN)
    weights["lm_head.weight"] = _normal(gen, DRAFT_VOCAB, HIDDEN, scale=0.35)
    kept = torch.randperm(VOCAB, generator=gen)[:DRAFT_VOCAB].sort().values
    weights["d2t"] = kept - torch.arange(DRAFT_VOCAB)
    config = _COMMON | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    return _write(folder, config, weights)


def _block(gen: torch.Generator, prefix: str, qkv_inputs: int) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, qkv_inputs),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, qkv_inputs),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, qkv_inputs),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    return {f"{prefix}{name}.weight": _normal(gen, *shape) for name, shape in shapes.items()}


def _normal(
    gen: torch.Generator, rows: int, columns: int, scale: float | None = None
) -> torch.Tensor:
    return torch.randn(rows, columns, generator=gen) * (scale or 1.5 * columns**-0.5)


def _write(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
