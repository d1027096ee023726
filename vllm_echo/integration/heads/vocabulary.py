# SPDX-License-Identifier: Apache-2.0
"""The head's vocabulary: which tokens of the target it drafts from.

``d2t[i]`` is the target's id of draft token i, less i. vLLM believes whatever it is given, takes a
missing map for zeros, and the target's first rows for a missing output layer: nothing would fit,
nothing would be accepted, and nothing would say so.
"""

import torch

from vllm_echo.errors import EchoConfigError
from vllm_echo.integration.heads.files import Tensors
from vllm_echo.integration.heads.form import HeadForm


def check_vocabulary(where: str, tensors: Tensors, form: HeadForm) -> None:
    """Refuse a vocabulary that cannot be the one the head was trained with."""
    size = form.draft_vocab_size
    if form.has_reduced_vocabulary:
        drafts = f"drafts from {size} of {form.vocab_size} tokens (draft_vocab_size)"
        # A quantised output layer has other tensors than a weight.
        if not any(name.startswith("lm_head.") for name in tensors):
            raise EchoConfigError(
                f"{where} {drafts}, but has no lm_head.weight for them; export the head again "
                "with its output layer"
            )
        if "d2t" not in tensors:
            raise EchoConfigError(
                f"{where} {drafts}, but has no map d2t that says which; export the head again"
            )
    if "d2t" not in tensors:
        return
    offsets = tensors["d2t"]
    if offsets.shape != (size,) or offsets.is_floating_point():
        raise EchoConfigError(
            f"{where} has a d2t of shape {list(offsets.shape)} and type {offsets.dtype}, and not "
            f"{size} whole numbers (draft_vocab_size); export the head again"
        )
    if form.has_reduced_vocabulary:
        _check_map(where, offsets.long(), tensors.get("t2d"), form)
    elif offsets.any():
        raise EchoConfigError(
            f"{where} drafts from all {size} tokens, so the entries of its d2t (offsets: target id "
            "less draft id) have to be zeros, and they are not; remove d2t, or set "
            "draft_vocab_size to what the head was trained with"
        )


def _check_map(where: str, offsets: torch.Tensor, t2d: torch.Tensor | None, form: HeadForm) -> None:
    """Judge ``offsets`` [draft vocabulary] int64: could it be ids instead?

    ``t2d`` says of every target token whether the head knows it, and so which reading is right.
    Without it, ids are known by being distinct: among offsets two draft tokens that are neighbours
    in the target's vocabulary as well share one, and in a vocabulary of usual size many are.
    """
    size = offsets.shape[0]
    readings = {"offsets": torch.arange(size) + offsets, "ids": offsets}
    possible = {name for name, ids in readings.items() if _is_one_to_one(ids, form.vocab_size)}
    known = _known_tokens(t2d, form)
    if known is not None:
        fitting = {name for name in possible if torch.equal(readings[name].sort().values, known)}
        if "offsets" in fitting:
            return
        if possible and not fitting:
            raise EchoConfigError(
                f"{where} has a d2t and a t2d that contradict each other (t2d marks "
                f"{known.shape[0]} tokens, and d2t names others); export the head again"
            )
        possible = fitting
    elif "offsets" in possible and size * size < 20 * form.vocab_size:
        return  # too few tokens to expect neighbours among them
    if "ids" in possible:
        raise EchoConfigError(
            f"{where} has a d2t that holds target ids ({', '.join(map(str, offsets[:3].tolist()))}"
            ", ...), and vLLM reads offsets (target id less draft id); subtract "
            f"torch.arange({size}) from it"
        )
    if "offsets" not in possible:
        raise EchoConfigError(
            f"{where} has a d2t that names tokens twice or outside the vocabulary (entries are "
            "offsets: target id less draft id); export the head again"
        )


def _is_one_to_one(ids: torch.Tensor, vocab_size: int) -> bool:
    inside = bool((ids >= 0).all()) and bool((ids < vocab_size).all())
    return inside and ids.unique().shape[0] == ids.shape[0]


def _known_tokens(t2d: torch.Tensor | None, form: HeadForm) -> torch.Tensor | None:
    """Ascending target ids that ``t2d`` marks; None where it is no such mask, or left empty."""
    if t2d is None or t2d.dtype != torch.bool or t2d.shape != (form.vocab_size,):
        return None
    known = t2d.nonzero().flatten()
    return known if known.numel() else None
