# SPDX-License-Identifier: Apache-2.0
"""The tensors of a draft head in a local folder: are those that matter there, and of which shape?

Only the headers of safetensors files are read, and the small vocabulary map. Heads in other formats
are left to vLLM's loader.
"""

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_echo.errors import EchoConfigError

if TYPE_CHECKING:
    from vllm_echo.integration.head import HeadShape

OTHER_WEIGHTS = ("*.bin", "*.pt")
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
Header = dict[str, tuple[Path, list[int]]]


def check_tensors(where: str, folder: Path, shape: "HeadShape") -> None:
    """Refuse a head whose tensors contradict its configuration."""
    tensors = _read_headers(where, folder)
    if not tensors:
        if not any(any(folder.glob(pattern)) for pattern in OTHER_WEIGHTS):
            raise EchoConfigError(
                f"{where} has a config.json but no weights (no *.safetensors); copy the whole "
                "folder, or download the head again"
            )
        return
    hidden, vocab, draft_vocab = shape.hidden_size, shape.vocab_size, shape.draft_vocab_size
    expected = {"lm_head.weight": [draft_vocab, hidden], "embed_tokens.weight": [vocab, hidden]}
    if shape.uses_aux_hidden_states:
        expected["fc.weight"] = [hidden, shape.target_hidden_size * shape.num_aux_hidden_states]
        if "fc.weight" not in tensors:
            raise EchoConfigError(
                f"{where} has no tensor fc.weight, so it is no EAGLE-3 head; give one that was "
                "trained for the served model"
            )
    for name, right in expected.items():
        if name in tensors and tensors[name][1] != right:
            raise EchoConfigError(
                f"{where} has {name} of shape {tensors[name][1]}, but its config.json asks for "
                f"{right}; export the head again"
            )
    if hidden != shape.target_hidden_size and "embed_tokens.weight" not in tensors:
        raise EchoConfigError(
            f"{where} is {hidden} wide and the served model {shape.target_hidden_size}, so it "
            "needs an embed_tokens.weight of its own; export the head again"
        )
    _check_vocabulary_map(where, tensors, shape)


def _check_vocabulary_map(where: str, tensors: Header, shape: "HeadShape") -> None:
    """`d2t[i]` is the target's id of draft token i, less i. vLLM takes a missing one for zeros."""
    draft_vocab = shape.draft_vocab_size
    if "d2t" not in tensors:
        if draft_vocab != shape.vocab_size:
            raise EchoConfigError(
                f"{where} drafts from {draft_vocab} of {shape.vocab_size} tokens, but has no map "
                "d2t that says which; export the head again"
            )
        return
    from safetensors import safe_open

    with safe_open(tensors["d2t"][0], framework="np") as file:
        offsets = file.get_tensor("d2t")
    if offsets.shape != (draft_vocab,):
        raise EchoConfigError(
            f"{where} has a d2t of shape {list(offsets.shape)}, but draft_vocab_size "
            f"{draft_vocab}; export the head again"
        )
    ids = [index + int(offset) for index, offset in enumerate(offsets)]
    if min(ids) < 0 or max(ids) >= shape.vocab_size or len(set(ids)) != len(ids):
        raise EchoConfigError(
            f"{where} has a d2t that names tokens twice or outside the vocabulary (entries are "
            "offsets: target id less draft id); export the head again"
        )


def _read_headers(where: str, folder: Path) -> Header:
    """Name -> (file, shape) of every tensor in the folder's safetensors files."""
    tensors: Header = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _read_header(where, path).items():
            if name != "__metadata__":
                tensors[name] = (path, entry["shape"])
    return tensors


def _read_header(where: str, path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        prefix = file.read(8)
        size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        content = file.read(size) if size <= MAX_HEADER_BYTES else b""
    try:
        header = json.loads(content)
    except ValueError:
        raise EchoConfigError(
            f"{where} has a broken file {path.name} (no safetensors header); fetch it again"
        ) from None
    return header
