# SPDX-License-Identifier: Apache-2.0
"""A cost curve at start-up, for a policy that needs one where the configuration has none.

Half a minute instead of the several that `vllm-echo profile` takes, and coarser: it times the
target's forward and output layer, attention over a context, the head with its weights as cold as a
target's forward leaves them, and the bookkeeping of candidates, but sees no scheduler and no way
between processes. What that leaves out, serving corrects (``core.watch``).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_echo.core.accept import accept_given
from vllm_echo.core.commit import commit_paths
from vllm_echo.core.cost import CostCurve, Line
from vllm_echo.core.pack import pack_trees
from vllm_echo.core.stats import StepStats
from vllm_echo.core.sweep import Sweep, take_sweep
from vllm_echo.core.timing import waited_seconds
from vllm_echo.core.tree import ROOT, DraftTrees
from vllm_echo.integration.cpu.attention import TreeRows
from vllm_echo.integration.cpu.drafter import HeadRows
from vllm_echo.integration.cpu.runner import EchoCPUModelRunner
from vllm_echo.integration.log import echo_logger
from vllm_echo.integration.profile_store import load_profile, profile_path, store_profile

logger = echo_logger(__name__)

REPEATS = 5
_REPEATS_OF_MANY = 3
_MANY_ROWS = 128
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CHECKED_ROWS = (1, 16, 64)
_FEW, _SEVERAL = 1, 64
_SHORT_CONTEXT, _LONG_CONTEXT = 64, 1024
_CONTEXT_REQUESTS = 16
_CONTEXT_ROWS = 9
_NODES_OF_A_REQUEST = 4
_DIGITS = 4

STEP_AGREES = 1.1
"""Most that a size's two best takes of the target may differ by in a curve that is kept."""
PART_AGREES = 1.3
"""As much for the rest of a step, whose share is small."""
LONGEST_WAIT = 0.05
"""Most of the time of a measurement in which another process had the core: passes agree under a
steady load, and are wrong together."""
STORED_AGREES = 1.15
"""Most by which a stored curve may be further off at one size than at another; that the machine
is slower or faster as a whole changes no decision."""


def settle_profile(runner: EchoCPUModelRunner) -> None:
    """Before the first request: see that a policy which needs a cost curve has one. It is taken
    from the configuration, else from the store where it still holds, else measured, and stored
    when the machine was quiet enough for its passes to agree."""
    config = runner.pipeline.config
    if not config.needs_profile or config.profile is not None:
        return
    path = profile_path(runner.vllm_config)
    group = get_tp_group()
    found, source = group.broadcast_object(load_profile(path)), str(path)
    if found is None:
        logger.info("ECHO: no cost curve in the configuration or in %s; measuring one", path)
    elif (off := departure(runner, found)) > STORED_AGREES:
        logger.warning(
            "ECHO: steps depart from the cost curve in %s by %.2f, at one size against another; "
            "measuring anew",
            path,
            off,
        )
        found = None
    if found is None:
        measured = measure_in_worker(runner)
        found, source = measured.curve, "a measurement just now"
        if not measured.agreed:
            logger.warning(
                "ECHO: the machine is busy (passes over the same steps differ by %.2f, and this "
                "process waited for a core %.0f %% of the time), so this cost curve is not kept "
                "and the next start measures again; start with nothing else running, or run "
                "`vllm-echo profile`",
                measured.disagreement,
                100 * measured.waited,
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
    """A curve, and how far its passes differed: quotients, 1 on a quiet machine."""

    curve: CostCurve
    disagreement: float
    """Of the target's steps."""
    parts_disagreement: float = 1.0
    """Of everything else."""
    waited: float = 0.0
    """Share of the time in which this process had no core."""

    @property
    def agreed(self) -> bool:
        """Is it worth keeping?"""
        return (
            self.disagreement <= STEP_AGREES
            and self.parts_disagreement <= PART_AGREES
            and self.waited <= LONGEST_WAIT
        )


def departure(runner: EchoCPUModelRunner, curve: CostCurve) -> float:
    """How much further ``curve`` is off at one size than at another, as a quotient; 1 where the
    machine is too busy to say."""
    most = min(runner.max_num_tokens, _ROWS[-1])
    sizes = [rows for rows in _CHECKED_ROWS if rows <= most]
    found = _sweep(sizes, partial(_target, runner))
    if not found.agree(STEP_AGREES):
        return 1.0
    ratios = [ms / curve.step_ms(rows) for rows, ms in found.points]
    return max(ratios) / min(ratios)


def measure_in_worker(runner: EchoCPUModelRunner) -> QuickProfile:
    """Measure ``runner``'s models, the same on all ranks; its KV caches hold nothing yet and are
    written to."""
    started, waited_before = time.perf_counter(), waited_seconds()
    most = min(runner.max_num_tokens, _ROWS[-1])
    step = _sweep([rows for rows in _ROWS if rows <= most], partial(_target, runner))
    sizes = (_FEW, min(_SEVERAL, most)) if most > _FEW else (_FEW,)
    # In life the head's weights come from memory: the target's have been through the caches.
    cold = partial(_target, runner, _FEW)
    roots, head, control = (
        _sweep(sizes, partial(run, runner), cold) for run in (_roots, _head, _candidates)
    )
    heads, whole = _line(roots), _line(head)
    # The whole head is more than a catch-up needs beyond writing its KV; a layer is both.
    layer = Line(round(whole.fixed + heads.fixed, _DIGITS), round(whole.each + heads.each, _DIGITS))
    curve = CostCurve(
        step=tuple((rows, round(ms, _DIGITS)) for rows, ms in step.points),
        roots=heads,
        layer=layer,
        catch_up=whole,
        control=_line(control),
        **_context_us(runner),
    )
    waited = (waited_seconds() - waited_before) / (time.perf_counter() - started)
    return QuickProfile(
        curve,
        disagreement=step.disagreement,
        parts_disagreement=max(sweep.disagreement for sweep in (roots, head, control)),
        waited=get_tp_group().broadcast_object(waited),
    )


def _sweep(
    sizes: Sequence[int], run: Callable[[int], object], before: Callable[[], object] | None = None
) -> Sweep:
    def take(size: int) -> list[float]:
        # Rank 0's times: what is measured again has to be the same on all ranks.
        return get_tp_group().broadcast_object(times_ms(partial(run, size), before, size))

    return take_sweep(sizes, take)


def times_ms(
    call: Callable[[], object], before: Callable[[], object] | None = None, size: int = 1
) -> list[float]:
    """Milliseconds of calls after one that does not count; ``before`` runs ahead of each."""
    call()
    times = []
    for _ in range(REPEATS if size <= _MANY_ROWS else _REPEATS_OF_MANY):
        if before is not None:
            before()
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return times


def _line(sweep: Sweep) -> Line:
    """Through the two points of ``sweep``, neither part below 0."""
    (few, low), (many, high) = sweep.points[0], sweep.points[-1]
    each = max(0.0, (high - low) / max(1, many - few))
    return Line(round(max(0.0, low - few * each), _DIGITS), round(each, _DIGITS))


def _context_us(runner: EchoCPUModelRunner) -> dict[str, float]:
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

    def attend(rows: int, context: int) -> None:
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
        sweep = _sweep((_SHORT_CONTEXT, long), partial(attend, rows))
        (_, short), (_, longer) = sweep.points
        return max(0.0, 1000 * (longer - short) / (requests * (long - _SHORT_CONTEXT)))

    first, all_rows = each(1), each(_CONTEXT_ROWS)
    further = min(first, max(0.0, all_rows - first) / (_CONTEXT_ROWS - 1))
    return {"context_us": round(first, _DIGITS), "node_context_us": round(further, _DIGITS)}


def _target(runner: EchoCPUModelRunner, rows: int = _FEW) -> None:
    # vLLM's warm-up run goes on to the head, once for each draft token.
    with patch.object(runner.drafter, "dummy_run", lambda *args, **kwargs: None):
        hidden, _ = runner._dummy_run(rows)
    runner.model.compute_logits(hidden[:rows])


def _roots(runner: EchoCPUModelRunner, rows: int) -> None:
    hidden = torch.zeros(rows, runner.drafter.hidden_size, dtype=runner.drafter.dtype)
    runner.drafter.top_children(hidden, runner.pipeline.config.top_k)


def _head(runner: EchoCPUModelRunner, rows: int) -> None:
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


def _candidates(runner: EchoCPUModelRunner, nodes: int) -> None:
    """What candidates cost beside the forward: packed, walked, committed, counted. Each request has
    siblings, and the last one is accepted, so that its KV moves; within block 0 again."""
    each = min(_NODES_OF_A_REQUEST, runner.num_spec_tokens, nodes)
    requests = nodes // each
    tokens = torch.arange(each, dtype=torch.int32).repeat(requests, 1)
    siblings = DraftTrees(
        tokens,
        parents=torch.full_like(tokens, ROOT),
        depths=torch.ones_like(tokens),
        num_nodes=torch.full((requests,), each, dtype=torch.int32),
    )
    tree = pack_trees(siblings)
    paths = accept_given(tree, torch.full_like(tree.tokens, each - 1))
    commit_paths(
        [layer.kv_cache for layer in runner.target_layers],
        torch.zeros(requests, 1, dtype=torch.int32),
        torch.zeros(requests, dtype=torch.int32),
        paths,
    )
    StepStats.of_step(tree, paths, None)
