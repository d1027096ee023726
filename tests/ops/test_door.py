# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments are refused by name, and the operators are registered properly."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tests.ops.calls import (
    ATTENTION_NAMES,
    GAIN,
    OPERATORS,
    accept_arguments,
    admit_arguments,
    append_arguments,
    attention_arguments,
    call_attention,
    commit_arguments,
    frontier_arguments,
    gain_arguments,
    greedy_arguments,
    layer_arguments,
    order_arguments,
    pack_arguments,
    read_arguments,
    sampled_arguments,
    score_arguments,
    size_arguments,
)
from vllm_echo import ops
from vllm_echo.ops import library

TENSORS = [
    pytest.param(op, call, make, name, id=f"{op}-{name}")
    for op, call, make in OPERATORS
    for name in make()
]
Call = Callable[[dict[str, torch.Tensor]], None]
Make = Callable[[], dict[str, torch.Tensor]]


@pytest.mark.parametrize(("op", "call", "make", "name"), TENSORS)
def test_a_wrong_dtype_is_refused_by_name(op: str, call: Call, make: Make, name: str) -> None:
    arguments = make()
    call(arguments)
    arguments[name] = arguments[name].to(torch.int16)  # no operator takes it
    with pytest.raises(ValueError, match=f"{op}: {name} must have dtype"):
        call(arguments)


@pytest.mark.parametrize(("op", "call", "make", "name"), TENSORS)
def test_a_wrong_number_of_dimensions_is_refused_by_name(
    op: str, call: Call, make: Make, name: str
) -> None:
    arguments = make()
    arguments[name] = arguments[name][None]
    with pytest.raises(ValueError, match=f"{op}: {name} must have . dimensions"):
        call(arguments)


@pytest.mark.parametrize(("op", "call", "make", "name"), TENSORS)
def test_a_wrong_device_is_refused_by_name(op: str, call: Call, make: Make, name: str) -> None:
    """No GPU needed to show it: a meta tensor is on another device, too."""
    arguments = make()
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(TypeError, match=f"{op}: {name} must be on the CPU"):
        call(arguments)


def strided_last(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, but not contiguous in the last dimension."""
    wide = tensor.new_zeros(*tensor.shape, 2)
    wide[..., 0] = tensor
    return wide[..., 0]


@pytest.mark.parametrize(
    ("blamed", "changed", "change"),
    [
        ("query", ["query", "out"], lambda t: t[:, :3]),  # 3 heads over 2 KV heads
        ("query", ["query", "out"], lambda t: t[..., :24]),
        ("query", ["query"], strided_last),
        ("key_cache", ["key_cache", "value_cache"], lambda t: t[:, :, :24]),
        ("key_cache", ["key_cache", "value_cache"], lambda t: t[..., :16]),
        ("key_cache", ["key_cache", "value_cache"], lambda t: t[:, :, ::2]),
        ("key_cache", ["key_cache"], strided_last),
        ("value_cache", ["value_cache"], lambda t: t[:1]),
        ("value_cache", ["value_cache"], strided_last),
        ("block_table", ["block_table"], lambda t: t[:1]),
        ("cu_rows", ["cu_rows"], lambda t: t[:-1]),
        ("cu_rows", ["cu_rows"], lambda t: t + 1),
        ("cu_rows", ["cu_rows"], lambda t: t[[0, 2, 1]]),
        ("cu_rows", ["cu_rows"], lambda t: t.clamp(max=3)),
        ("context_lens", ["context_lens"], lambda t: -t),
        ("mask", ["mask"], lambda t: t[:-1]),
        ("mask", ["mask"], lambda t: strided_last(t.expand(4, 2))),
        ("out", ["out"], lambda t: t[:-1]),
        ("out", ["out"], strided_last),
    ],
)
def test_wrong_shapes_and_values_of_attention(
    blamed: str, changed: list[str], change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    arguments = attention_arguments()
    out = arguments["out"]
    for name in changed:
        arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=f"tree_attention: {blamed} "):
        call_attention(arguments)
    assert out.isnan().all()


@pytest.mark.parametrize("block", [-1, 3, 2**31 - 1])
def test_a_block_outside_the_cache_is_never_read(block: int) -> None:
    arguments = attention_arguments()
    arguments["block_table"][1, 0] = block
    with pytest.raises(ValueError, match="tree_attention: block_table names block"):
        call_attention(arguments)


def test_a_mask_bit_beyond_the_block_table_is_never_read() -> None:
    arguments = attention_arguments()
    arguments["mask"][3] = 1 << 62
    with pytest.raises(ValueError, match="tree_attention: block_table has room for"):
        call_attention(arguments)


def test_caches_that_commit_cannot_move_are_refused() -> None:
    for cache in (
        torch.zeros(1, 2, 16, 32, dtype=torch.float64),
        torch.zeros(2, 16, 32),
        torch.zeros(1, 2, 16, 33),
        torch.zeros(1, 2, 32, 16).mT,
    ):
        with pytest.raises(ValueError, match=r"commit_kv: kv_caches\[1\]"):
            ops.commit_kv([torch.zeros(1, 2, 16, 32), cache], **commit_arguments())


def test_a_negative_softcap_is_refused() -> None:
    with pytest.raises(ValueError, match="softcap"):
        ops.tree_attention(**attention_arguments(), scale=1.0, softcap=-1.0)


def test_the_output_is_allocated_on_request() -> None:
    arguments = attention_arguments()
    call_attention(arguments)
    want = arguments.pop("out")
    assert torch.equal(ops.tree_attention(**arguments, scale=0.2), want)


def test_attention_passes_opcheck() -> None:
    arguments = attention_arguments()
    arguments["out"].zero_()  # NaN is not equal to itself
    positional = [arguments[name] for name in ATTENTION_NAMES]
    op = torch.ops.vllm_echo.tree_attention.default
    opcheck(op, (*positional, 0.2, 0.0, arguments["out"]))


def test_commit_passes_opcheck() -> None:
    caches = [torch.randn(1, 2, 16, 32) for _ in range(2)]
    op = torch.ops.vllm_echo.commit_kv.default
    opcheck(op, (caches, *commit_arguments().values()))


def test_accept_passes_opcheck() -> None:
    op = torch.ops.vllm_echo.accept_paths.default
    for max_nodes in (None, 0, 3):
        opcheck(op, (*accept_arguments().values(), max_nodes))


def test_greedy_passes_opcheck() -> None:
    op = torch.ops.vllm_echo.accept_greedy.default
    for max_nodes in (None, 0, 3):
        opcheck(op, (*greedy_arguments().values(), max_nodes))


def test_sampled_passes_opcheck() -> None:
    op = torch.ops.vllm_echo.accept_sampled.default
    for max_nodes in (None, 1, 4):
        opcheck(op, (*sampled_arguments().values(), max_nodes))


def test_pack_passes_opcheck() -> None:
    op = torch.ops.vllm_echo.pack_trees.default
    for max_rows in (None, 5, 9):
        opcheck(op, (*pack_arguments().values(), max_rows))


@pytest.mark.parametrize("rule", [0, 1, 2])
def test_order_passes_opcheck(rule: int) -> None:
    op = torch.ops.vllm_echo.order_trees.default
    for max_nodes in (2, 5):
        opcheck(op, (*order_arguments().values(), rule, True, max_nodes))


def test_admission_passes_opcheck() -> None:
    opcheck(torch.ops.vllm_echo.admit_nodes.default, (*admit_arguments().values(), 2))
    op = torch.ops.vllm_echo.fastest_size.default
    opcheck(op, (*size_arguments().values(), 2, 20.0))


def test_score_passes_opcheck() -> None:
    opcheck(torch.ops.vllm_echo.score_children.default, tuple(score_arguments().values()))


def test_append_passes_opcheck() -> None:
    op = torch.ops.vllm_echo.append_layer.default
    *layer, parent_scores, parent_columns = append_arguments().values()
    opcheck(op, (*layer, parent_scores, parent_columns, 3))
    *table, requests, tokens, scores, chain_only = layer
    roots = (tokens.view(2, 1, 4), scores.view(2, 1, 4))
    opcheck(op, (*table, requests, *roots, chain_only, None, None, 0))


def test_grants_pass_opcheck() -> None:
    library = torch.ops.vllm_echo
    for threshold in (None, 0.3):
        layer = (*layer_arguments().values(), 1, threshold, 2)
        opcheck(library.grant_layer.default, layer)
    opcheck(library.expect_gain.default, (*gain_arguments().values(), 1, *GAIN.values()))


def test_frontier_passes_opcheck() -> None:
    op = torch.ops.vllm_echo.next_frontier.default
    *layer, previous, ancestors = frontier_arguments().values()
    for above in ((None, None), (previous, ancestors)):
        opcheck(op, (*layer, 2, *above))


def test_read_passes_opcheck() -> None:
    op = torch.ops.vllm_echo.read_trees.default
    opcheck(op, tuple(read_arguments().values()))


def test_build_info_names_what_doctor_prints() -> None:
    info = ops.build_info()
    assert info["simd"] in ("portable", "avx2", "avx512", "avx512bf16")
    assert info["torch"].count(".") == 2
    assert info["compiler"]


def test_an_unknown_simd_level_is_refused() -> None:
    with pytest.raises(ValueError, match="simd level"):
        ops.set_simd_level("mmx")


def test_importing_the_package_imports_no_torch_and_ops_no_vllm() -> None:
    code = (
        "import sys, vllm_echo; assert 'torch' not in sys.modules\n"
        "import vllm_echo.ops; assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_build_says_how_to_build() -> None:
    code = "import sys; sys.modules['vllm_echo._C'] = None; import vllm_echo.ops"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0
    assert "make build" in result.stderr
    assert "pip install -e ." in result.stderr


def test_a_build_without_cuda_says_so_where_there_is_a_device() -> None:
    code = (
        "import logging, torch; logging.basicConfig()\n"
        "torch.version.cuda = '13.0'; torch.cuda.is_available = lambda: True\n"
        "import vllm_echo.ops"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0
    if ops.build_info()["cuda"] == "none":
        assert "built without CUDA" in result.stderr
        assert "ECHO_BUILD_CUDA=1" in result.stderr
    else:
        assert "built without CUDA" not in result.stderr


def test_the_budget_is_spent_at_once_on_a_device_only() -> None:
    arguments = order_arguments().values()
    with pytest.raises(TypeError, match="tokens must be on a CUDA device.*use order_trees and adm"):
        ops.schedule_budget(*arguments, 3, True, 5)


def test_the_tree_part_alone_needs_a_device() -> None:
    rows = torch.zeros(1, 1, 64)
    with pytest.raises(TypeError, match="query must be on a CUDA device, got cpu"):
        ops.tree_part_attention(
            rows, rows, rows, torch.tensor([0, 1]).int(), torch.ones(1, 1).long(), 1.0
        )


@pytest.mark.parametrize("softcap", [(), (0.0,), (2.0,)], ids=["left out", "off", "on"])
def test_the_tree_part_has_its_shapes_without_a_device(
    monkeypatch: pytest.MonkeyPatch, softcap: tuple[float, ...]
) -> None:
    """The dispatcher leaves arguments out that equal their default: a fake has to take both."""
    monkeypatch.setattr(library, "HAS_CUDA", True)
    with FakeTensorMode():
        query, key = torch.empty(3, 4, 64, device="cuda"), torch.empty(3, 2, 64, device="cuda")
        cu_rows = torch.empty(2, dtype=torch.int32, device="cuda")
        ancestors = torch.empty(3, 1, dtype=torch.int64, device="cuda")
        rows = (query, key, key, cu_rows, ancestors)
        out, lse = torch.ops.vllm_echo.tree_part_attention(*rows, 1.0, *softcap)
    assert out.shape == (3, 4, 64) and lse.shape == (4, 3)
    assert out.device.type == lse.device.type == "cuda"
    assert lse.dtype == torch.float32
