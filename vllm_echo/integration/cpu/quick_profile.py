# SPDX-License-Identifier: Apache-2.0
"""A cost curve from inside the worker, for `"k_max": "auto"` without a stored profile.

Seconds instead of the minute that `vllm-echo profile` takes, and coarser: it times the target's
forward and output layer, and the head, but sees no scheduler, no attention over a context and no
way between processes. A step then looks shorter than it is, a candidate relatively dearer, and
the budget errs on the side of plain decoding.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from vllm_echo.cost import CostCurve, Line
from vllm_echo.integration.cpu.drafter import HeadRows

if TYPE_CHECKING:
    from vllm_echo.integration.cpu.runner import EchoCPUModelRunner

REPEATS = 5
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_DIGITS = 4


def measure_in_worker(runner: "EchoCPUModelRunner") -> CostCurve:
    """The curve of ``runner``'s models; its KV caches hold nothing yet and are written to."""
    most = min(runner.max_num_tokens, _ROWS[-1])
    sizes = [rows for rows in _ROWS if rows <= most]
    step: list[tuple[int, float]] = []
    for rows in sizes:
        ms = median_ms(partial(_target, runner, rows))
        step.append((rows, round(max(ms, step[-1][1] if step else 0.0), _DIGITS)))
    few, many = sizes[0], min(64, most)
    heads = _line(lambda rows: median_ms(partial(_roots, runner, rows)), few, many)
    # The whole head is more than a catch-up needs beyond writing its KV; a layer is both.
    whole = _line(lambda rows: median_ms(partial(_head, runner, rows)), few, many)
    layer = Line(round(whole.fixed + heads.fixed, _DIGITS), round(whole.each + heads.each, _DIGITS))
    return CostCurve(
        step=tuple(step), roots=heads, layer=layer, catch_up=whole, control=Line(0.0, 0.0)
    )


def median_ms(call: Callable[[], object]) -> float:
    """Milliseconds of ``call``, the median of ``REPEATS`` after one that does not count."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * sorted(times)[REPEATS // 2]


def _line(ms_of: Callable[[int], float], few: int, many: int) -> Line:
    low, high = ms_of(few), ms_of(many)
    each = max(0.0, (high - low) / max(1, many - few))
    return Line(round(max(0.0, low - few * each), _DIGITS), round(each, _DIGITS))


def _target(runner: "EchoCPUModelRunner", rows: int) -> None:
    hidden, _ = runner._dummy_run(rows)
    runner.model.compute_logits(hidden[:rows])


def _roots(runner: "EchoCPUModelRunner", rows: int) -> None:
    hidden = torch.zeros(rows, runner.drafter.hidden_size, dtype=runner.drafter.dtype)
    runner.drafter.top_children(hidden, runner.pipeline.config.top_k)


def _head(runner: "EchoCPUModelRunner", rows: int) -> None:
    """Root rows at position 0 of a block table of zeros: vLLM's block 0 belongs to nobody."""
    drafter = runner.drafter
    roots = HeadRows(
        token_ids=torch.zeros(rows, dtype=torch.int32),
        positions=torch.zeros(rows, dtype=torch.int64),
        cu_rows=torch.arange(rows + 1, dtype=torch.int32),
        block_table=torch.zeros(rows, 1, dtype=torch.int32),
    )
    drafter.run_rows(roots, torch.zeros(rows, drafter.hidden_size, dtype=drafter.dtype))
