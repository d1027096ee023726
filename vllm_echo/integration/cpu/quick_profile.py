# SPDX-License-Identifier: Apache-2.0
"""A cost curve at start-up, for a policy that needs one where the configuration has none.

Seconds instead of the minutes that `vllm-echo profile` takes, and coarser: it times the target's
forward and output layer, attention over a context, and the head, but sees no scheduler and no way
between processes. A step then looks shorter than it is, a candidate relatively dearer, and the
budget errs on the side of plain decoding.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_echo.core.cost import CostCurve, Line
from vllm_echo.core.timing import NOISY, spread
from vllm_echo.integration.cpu.attention import TreeRows
from vllm_echo.integration.cpu.drafter import HeadRows
from vllm_echo.integration.log import echo_logger
from vllm_echo.integration.profile_store import load_profile, profile_path, store_profile

if TYPE_CHECKING:
    from vllm_echo.integration.cpu.runner import EchoCPUModelRunner

logger = echo_logger(__name__)

REPEATS = 5
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SHORT_CONTEXT, _LONG_CONTEXT = 64, 1024
_CONTEXT_REQUESTS = 16
_CONTEXT_ROWS = 9
_DIGITS = 4


def settle_profile(runner: "EchoCPUModelRunner") -> None:
    """Before the first request: see that a policy which needs a cost curve has one. It is
    taken from the configuration, else from the store, else measured and stored."""
    config = runner.pipeline.config
    if not config.needs_profile or config.profile is not None:
        return
    path = profile_path(runner.vllm_config)
    group = get_tp_group()
    found, source = group.broadcast_object(load_profile(path)), str(path)
    if found is None:
        logger.info("ECHO: no cost curve in the configuration or in %s; measuring one", path)
        measured = group.broadcast_object(measure_in_worker(runner))
        found, source = measured.curve, "a measurement just now"
        if measured.noise > NOISY:
            logger.warning(
                "ECHO: the machine is busy (step times differ by %.2f from quartile to "
                "quartile), so this cost curve is not kept and the next start measures again; "
                "start with nothing else running, or run `vllm-echo profile`",
                measured.noise,
            )
        elif group.rank_in_group == 0:
            store_profile(path, found)
    logger.info(
        "ECHO: cost curve from %s: steps of %s (rows, ms); `vllm-echo profile` measures better",
        source,
        found.step,
    )
    runner.pipeline.set_options(replace(config, profile=found))


@dataclass(frozen=True)
class QuickProfile:
    """A curve, and how quiet the machine was."""

    curve: CostCurve
    noise: float
    """``timing.spread`` of the typical measurement of the target."""


def measure_in_worker(runner: "EchoCPUModelRunner") -> QuickProfile:
    """Measure ``runner``'s models; its KV caches hold nothing yet and are written to."""
    most = min(runner.max_num_tokens, _ROWS[-1])
    sizes = [rows for rows in _ROWS if rows <= most]
    step: list[tuple[int, float]] = []
    noise = []
    for rows in sizes:
        times = times_ms(partial(_target, runner, rows))
        ms = statistics.median(times)
        step.append((rows, round(max(ms, step[-1][1] if step else 0.0), _DIGITS)))
        noise.append(spread(times))
    few, many = sizes[0], min(64, most)
    heads = _line(partial(_roots, runner), few, many)
    # The whole head is more than a catch-up needs beyond writing its KV; a layer is both.
    whole = _line(partial(_head, runner), few, many)
    layer = Line(round(whole.fixed + heads.fixed, _DIGITS), round(whole.each + heads.each, _DIGITS))
    curve = CostCurve(
        step=tuple(step),
        roots=heads,
        layer=layer,
        catch_up=whole,
        control=Line(0.0, 0.0),
        **_context_us(runner),
    )
    return QuickProfile(curve, statistics.median(noise))


def times_ms(call: Callable[[], object]) -> list[float]:
    """Milliseconds of ``REPEATS`` calls after one that does not count."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return times


def _line(run: Callable[[int], None], few: int, many: int) -> Line:
    low, high = (statistics.median(times_ms(partial(run, rows))) for rows in (few, many))
    each = max(0.0, (high - low) / max(1, many - few))
    return Line(round(max(0.0, low - few * each), _DIGITS), round(each, _DIGITS))


def _context_us(runner: "EchoCPUModelRunner") -> dict[str, float]:
    """Microseconds of attention, in all layers, for each token of a request's context: of a
    request's first row, and of every further one."""
    caches = [layer.kv_cache for layer in runner.target_layers]
    impl, block_size = runner.target_layers[0].impl, runner.cache_config.block_size
    num_blocks = caches[0].shape[0]
    long = min(_LONG_CONTEXT, runner.max_model_len, num_blocks * block_size)
    if long <= _SHORT_CONTEXT:
        return {}
    blocks = -(-long // block_size)
    requests = min(_CONTEXT_REQUESTS, num_blocks // blocks)
    for cache in caches:
        cache[: requests * blocks] = 0.01  # memory that was never written is no memory yet
    table = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)

    def attend(context: int, rows: int) -> None:
        num_rows = requests * rows
        query = torch.zeros(num_rows, impl.num_heads, impl.head_size, dtype=caches[0].dtype)
        tree = TreeRows(
            rows=slice(None),
            cu_rows=torch.arange(requests + 1, dtype=torch.int32) * rows,
            context_lens=torch.full((requests,), context, dtype=torch.int32),
            ancestors=torch.zeros(num_rows, 1, dtype=torch.int64),
            block_table=table,
        )
        for cache in caches:
            impl.attend_tree(query, cache, tree, torch.empty_like(query))

    def each(rows: int) -> float:
        """Of all rows of a request together."""
        short, longer = (
            statistics.median(times_ms(partial(attend, n, rows))) for n in (_SHORT_CONTEXT, long)
        )
        return max(0.0, 1000 * (longer - short) / (requests * (long - _SHORT_CONTEXT)))

    first, all_rows = each(1), each(_CONTEXT_ROWS)
    further = min(first, max(0.0, all_rows - first) / (_CONTEXT_ROWS - 1))
    return {"context_us": round(first, _DIGITS), "node_context_us": round(further, _DIGITS)}


def _target(runner: "EchoCPUModelRunner", rows: int) -> None:
    # vLLM's warm-up run goes on to the head, once for each draft token.
    with patch.object(runner.drafter, "dummy_run", lambda *args, **kwargs: None):
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
        slots=torch.zeros(rows, dtype=torch.int64),
        cu_rows=torch.arange(rows + 1, dtype=torch.int32),
        block_table=torch.zeros(rows, 1, dtype=torch.int32),
    )
    drafter.run_rows(roots, torch.zeros(rows, drafter.hidden_size, dtype=drafter.dtype))
