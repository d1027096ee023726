# SPDX-License-Identifier: Apache-2.0
"""How much memory a server takes, and how much of it should be KV cache."""

import json
from collections.abc import Mapping
from pathlib import Path

GIB = 2**30
BYTES_PER_VALUE = {"bfloat16": 2, "float16": 2, "float32": 4}
SERVER_BASE_BYTES = int(1.85 * GIB)
"""Three processes that have imported vLLM and torch, and a compiled model."""
WEIGHT_COPIES = 2
"""As loaded, and as packed for the processor's matrix product."""
SPARE_BYTES = 3 * GIB // 4
"""Left for everything else: the client, the tokenizer, the system."""
KV_STEP = GIB // 8
KV_UNKNOWN = GIB


def kv_bytes_per_token(model: str, dtype: str) -> int | None:
    """Of the target and one draft layer like its own; None where config.json does not say."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    try:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return (config["num_hidden_layers"] + 1) * heads * size * 2 * BYTES_PER_VALUE[dtype]
    except KeyError:
        return None


def kv_bytes(model: str, dtype: str, tokens: int) -> int:
    """A cache for ``tokens``, in eighths of a GiB."""
    per_token = kv_bytes_per_token(model, dtype)
    if per_token is None:
        return KV_UNKNOWN
    return -(-tokens * per_token // KV_STEP) * KV_STEP


def server_bytes(model: str, config: Mapping[str, object] | None, kv: int) -> int:
    """An estimate of what one server takes."""
    head = str(config.get("model", "")) if config else ""
    weights = sum(
        path.stat().st_size
        for folder in filter(None, (model, head))
        for path in Path(folder).glob("*.safetensors")
    )
    return SERVER_BASE_BYTES + WEIGHT_COPIES * weights + kv
