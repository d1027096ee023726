# SPDX-License-Identifier: Apache-2.0
"""Keyed sampling, the obvious way: MurmurHash3 over 16 bytes, Gumbel noise in float64."""

import math
import struct

import torch


def murmur3(data: bytes) -> int:
    """MurmurHash3 (x86, 32 bits) with seed 0 of whole words."""
    value = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & 0xFFFFFFFF
        word = (word << 15 | word >> 17) & 0xFFFFFFFF
        value ^= word * 0x1B873593 & 0xFFFFFFFF
        value = (value << 13 | value >> 19) & 0xFFFFFFFF
        value = (value * 5 + 0xE6546B64) & 0xFFFFFFFF
    value ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value ^= value >> shift
        value = value * factor & 0xFFFFFFFF
    return value


def gumbel(seed: int, position: int, token: int) -> float:
    """-log(-log(1 - u)), u the hash of (seed, the position's low word, token) as a fraction."""
    key = struct.pack("<qII", seed, position & 0xFFFFFFFF, token)
    return -math.log(-math.log1p(-(murmur3(key) + 0.5) / 2**32))


def sample(logits: torch.Tensor, temperature: float, seed: int, position: int) -> int:
    """The token that plain decoding draws from ``logits`` [V] at ``position``."""
    if temperature == 0:
        return int(logits.float().argmax())
    noised = [
        logit / temperature + gumbel(seed, position, token)
        for token, logit in enumerate(logits.double().tolist())
    ]
    return max(range(len(noised)), key=noised.__getitem__)
