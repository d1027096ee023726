# SPDX-License-Identifier: Apache-2.0
"""Policies: the same stages, other decisions.

``echo``    sparse gates decide who goes deeper; budget moves between requests.
``static``  an EAGLE-style tree: fixed depth and top-k, the best nodes by path score.
``chain``   the most likely child only, to a fixed depth; what vLLM's ``eagle3`` drafts.

The fixed shapes have no gates and are drafted in full; where K_max cannot hold them all,
every request gets an equal share.
"""

from dataclasses import dataclass

from vllm_echo.config import EchoConfig
from vllm_echo.gate import SparseGates


@dataclass(frozen=True)
class Policy:
    """How far and how wide trees are drafted, and who decides."""

    max_depth: int
    """Deepest layer that is ever drafted."""
    top_k: int
    """Children drafted per expanded node."""
    gates: SparseGates
    elastic: bool
    """Grants of depth and width (echo) instead of an equal share of the budget."""

    frontier_widths: tuple[int, ...]
    """Nodes of depth 1, 2, ... that are expanded (``max_depth - 1`` entries)."""

    def first_slot(self, depth: int) -> int:
        """Draft slots taken by expanded nodes above ``depth``."""
        return sum(self.frontier_widths[: depth - 1])

    @property
    def num_draft_slots(self) -> int:
        """Draft slots that a request needs beyond its root."""
        return sum(self.frontier_widths)


def make_policy(config: EchoConfig) -> Policy:
    """The policy that ``config.policy`` names (validated by ``EchoConfig``)."""
    elastic = config.policy == "echo"
    max_depth = config.max_depth if elastic else config.target_depth
    top_k = 1 if config.policy == "chain" else config.top_k
    return Policy(
        max_depth=max_depth,
        top_k=top_k,
        frontier_widths=_frontier_widths(max_depth, top_k, config.num_speculative_tokens),
        gates=SparseGates.from_config(config) if elastic else SparseGates({}),
        elastic=elastic,
    )


def _frontier_widths(max_depth: int, top_k: int, max_nodes: int) -> tuple[int, ...]:
    """top_k nodes a layer while draft slots last, and one for every later layer.

    A request has ``max_nodes`` draft slots (what the engine reserves ahead), and an
    expanded node that is not among its best ``max_nodes`` is wasted, so at most
    ``max_nodes - 1`` are expanded in all. Needs ``max_depth <= max_nodes``.
    """
    left = max_nodes - 1
    widths = []
    for later_layers in reversed(range(max_depth - 1)):
        widths.append(min(top_k, left - later_layers))
        left -= widths[-1]
    return tuple(widths)
