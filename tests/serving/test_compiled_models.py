# SPDX-License-Identifier: Apache-2.0
"""vLLM keeps what it compiles; the next start loads it, and compiles again where it must not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

from tests.serving import tiny
from tests.serving.compiled import (
    PARAMS,
    PROMPTS,
    Start,
    start_echo,
    start_in_a_process_of_its_own,
    start_plain,
)
from tests.serving.harness import plain_engine, token_ids
from vllm_echo.integration import doors


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("vllm-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(folder))
        yield folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a head of this module's own, whose weights it may change."""
    return (
        tiny.make_target(tmp_path_factory.mktemp("target")),
        tiny.make_head(tmp_path_factory.mktemp("head")),
    )


@pytest.fixture(scope="module")
def first(cache: Path, pair: tuple[Path, Path]) -> Start:
    """The start that finds an empty cache."""
    return start_echo(*pair)


def eager_tokens(target: Path) -> list:
    return token_ids(plain_engine(target).generate(PROMPTS, PARAMS))


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("torch_compile_cache/torch_aot_compile/*/rank_0_0/model"))


def test_a_first_start_compiles_and_keeps_target_and_head(
    first: Start, cache: Path, pair: tuple[Path, Path]
) -> None:
    assert (first.compiled, first.loaded, first.saved) == (2, 0, 2)
    assert len(entries(cache)) == 2
    assert first.tokens == first.tokens_of_trees == eager_tokens(pair[0])
    assert any(any(step) for step in first.drafts), "nothing was drafted"
    assert first.accepted > len(PROMPTS)


def test_a_second_process_loads_both_and_decodes_and_drafts_the_same(
    first: Start, pair: tuple[Path, Path]
) -> None:
    """Catches every start compiling again: `finalize_loading` asked of what has no such method."""
    second = start_in_a_process_of_its_own(*pair)
    assert (second.compiled, second.loaded) == (0, 2)
    assert second.tokens == second.tokens_of_trees == first.tokens
    assert second.accepted > len(PROMPTS)
    assert second.drafts == first.drafts


def test_weights_that_changed_since_are_the_ones_that_serve(
    first: Start, pair: tuple[Path, Path]
) -> None:
    """A retrained pair in the same folders: code is kept, weights must not be part of it."""
    target, head = tiny.make_target(pair[0], seed=10), tiny.make_head(pair[1], seed=11)
    try:
        again = start_echo(target, head)
        expected = eager_tokens(target)
    finally:
        tiny.make_target(pair[0]), tiny.make_head(pair[1])
    assert (again.compiled, again.loaded) == (0, 2)
    assert again.tokens == expected
    assert again.tokens != first.tokens
    assert again.drafts != first.drafts


@pytest.fixture(scope="module")
def plain(cache: Path, pair: tuple[Path, Path]) -> Start:
    """A first start without speculation."""
    return start_plain(pair[0])


def test_plain_decoding_loads_its_model_too(plain: Start, pair: tuple[Path, Path]) -> None:
    again = start_plain(pair[0])
    assert (plain.compiled, plain.loaded) == (1, 0)
    assert (again.compiled, again.loaded) == (0, 1)
    assert again.tokens == plain.tokens == eager_tokens(pair[0])


@pytest.mark.parametrize("spoilt", ["cut short", "of other sources"])
def test_what_must_not_be_loaded_is_compiled_again_and_serves(
    spoilt: str,
    plain: Start,
    cache: Path,
    pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if spoilt == "cut short":
        for entry in entries(cache):
            entry.write_bytes(entry.read_bytes()[:1000])
    else:
        monkeypatch.setattr("vllm.compilation.caching._compute_code_hash", lambda files: "other")
    again = start_plain(pair[0])
    assert (again.compiled, again.loaded, again.saved) == (1, 0, 1)
    assert again.tokens == plain.tokens


def test_what_vllms_own_backend_saved_finishes_loading_as_before() -> None:
    """Of what it saved, the graphs are code only after `finalize_loading`."""
    from vllm.compilation.caching import VllmSerializableFunction

    class Saved(VllmSerializableFunction):
        def __init__(self) -> None:
            self.finalised_with: list = []

        def finalize_loading(self, vllm_config: object) -> None:
            self.finalised_with.append(vllm_config)

    saved, config = Saved(), object()
    doors.finish_loading(saved, config)
    assert saved.finalised_with == [config]


def test_the_key_of_a_compiled_model_knows_instruction_sets_and_nothing_that_varies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = torch.cpu.get_capabilities()
    key = doors.processor_factors()
    assert "avx2" in key[0]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**here, "num_logical_cores": 96})
    assert doors.processor_factors() == key
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**here, "avx2": False})
    assert doors.processor_factors() != key


def test_another_processor_looks_for_a_model_of_its_own(
    plain: Start, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache on a shared disk. Last in this module: it ends an engine's start."""
    fewer = {**torch.cpu.get_capabilities(), "avx512_f": False, "avx512_vnni": False, "avx2": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: fewer)
    monkeypatch.setattr(
        TorchCompileWithNoGuardsWrapper,
        "aot_compile",
        lambda *args, **kwargs: pytest.fail("compiles", pytrace=False),
    )
    with pytest.raises(pytest.fail.Exception, match="compiles"):
        start_plain(pair[0])
