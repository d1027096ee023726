# SPDX-License-Identifier: Apache-2.0
"""A cost curve by arithmetic: what a model's step takes on GPUs in tensor parallel, bf16.

A roofline: every matrix product takes the longer of reading its weights and multiplying, as does
attention with the KV cache; all-reduces, launches and the host come on top. No tile sizes, no
overlap, no imbalance. What the constants assume stands beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.simulate.models import Model, eagle3_head
from vllm_echo.core.cost import CostCurve, Line

BYTES = 2  # bf16


@dataclass(frozen=True)
class Gpus:
    """The machine, by its data sheet and by what is usually reached of it."""

    name: str = "H100 SXM"
    count: int = 8
    bytes_per_s: float = 3.35e12
    """HBM3, each."""
    flops_per_s: float = 989e12
    """Dense bf16, each."""
    link_bytes_per_s: float = 450e9
    """NVLink, each, one direction (900 GB/s both ways)."""
    reached_bytes: float = 0.75
    reached_flops: float = 0.6
    reached_link: float = 0.7
    all_reduce_us: float = 12.0
    """Latency of a small all-reduce; two a layer."""
    layer_us: float = 20.0
    """What a layer's kernels take whatever their size: launches in a graph, ramp-up, tails."""
    host_us: float = 1000.0
    """Scheduler, input preparation, sampling: of every step."""
    draft_host_us: float = 150.0
    """Of every draft forward: no graph spans several, since the host decides in between."""
    roots_host_us: float = 50.0
    """Output layer, softmax and top-k of the roots."""
    control_us: float = 300.0
    """Packing, acceptance and commit of a step."""
    control_node_us: float = 0.2

    def product_us(self, weights: float, rows: float, read: float | None = None) -> float:
        """A product of ``rows`` rows with ``weights`` weights, split over all GPUs; ``read`` of
        them are read where that is not all or more than once each."""
        read = weights if read is None else read
        reading = read * BYTES / (self.count * self.bytes_per_s * self.reached_bytes)
        multiplying = 2 * weights * rows / (self.count * self.flops_per_s * self.reached_flops)
        return 1e6 * max(reading, multiplying)

    def all_reduces_us(self, model: Model, rows: float) -> float:
        """The two all-reduces of a layer."""
        if self.count == 1:
            return 0.0
        moved = 2 * (self.count - 1) / self.count * rows * model.hidden * BYTES
        return 2 * (self.all_reduce_us + 1e6 * moved / (self.link_bytes_per_s * self.reached_link))

    def knee_rows(self) -> float:
        """Rows from which a dense product is bound by arithmetic."""
        flops, reads = self.flops_per_s * self.reached_flops, self.bytes_per_s * self.reached_bytes
        return flops / reads * BYTES / 2

    def kv_bytes(self, model: Model) -> float:
        """Bytes that one GPU keeps per context token and layer: KV heads are split over GPUs,
        and held more than once where there are fewer heads than GPUs."""
        return 2 * max(1.0, model.kv_heads / self.count) * model.head_dim * BYTES


@dataclass(frozen=True)
class Parts:
    """Microseconds of a plain step's parts."""

    attention_products: float
    mlp_products: float
    output_layer: float
    kv_cache: float
    all_reduces: float
    layers: float
    host: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def step_parts(gpus: Gpus, model: Model, rows: float, requests: int, context: float) -> Parts:
    """A step of ``rows`` rows for ``requests`` requests of ``context`` tokens each. The rows of
    a request share one reading of its KV cache."""
    layers = model.layers
    chosen = model.experts_per_token or 1
    reading = requests * context * gpus.kv_bytes(model)
    reading /= gpus.bytes_per_s * gpus.reached_bytes
    scoring = rows * context * 4 * model.heads * model.head_dim
    scoring /= gpus.count * gpus.flops_per_s * gpus.reached_flops
    return Parts(
        attention_products=layers * gpus.product_us(model.attention_weights, rows),
        mlp_products=layers
        * gpus.product_us(
            chosen * model.expert_weights,
            rows,
            read=model.distinct_experts(rows) * model.expert_weights,
        ),
        output_layer=gpus.product_us(model.output_weights, rows),
        kv_cache=layers * 1e6 * max(reading, scoring),
        all_reduces=layers * gpus.all_reduces_us(model, rows),
        layers=layers * gpus.layer_us,
        host=gpus.host_us,
    )


def cost_curve(gpus: Gpus, model: Model, requests: int, context: float) -> CostCurve:
    """The curve of a machine that serves ``requests`` requests of ``context`` tokens each.

    Their KV cache is read once a step, by however many rows: it is part of ``step``, and
    ``context_us`` is 0. Hence a curve for every load.
    """
    head = eagle3_head(model)
    kv_us = 1e6 * context * gpus.kv_bytes(model) / (gpus.bytes_per_s * gpus.reached_bytes)

    def forward_us(weights: int, nodes: float) -> float:
        fixed = gpus.draft_host_us + gpus.layer_us + gpus.all_reduces_us(model, nodes)
        return fixed + gpus.product_us(weights, nodes) + kv_us * nodes

    def roots_us(nodes: float) -> float:
        return gpus.roots_host_us + gpus.product_us(head.output, nodes)

    def layer_us(nodes: float) -> float:
        return forward_us(head.layer, nodes) + gpus.product_us(head.output, nodes)

    def catch_up_us(nodes: float) -> float:
        return forward_us(head.layer + head.fusion, nodes)

    return CostCurve(
        step=tuple(
            (rows, step_parts(gpus, model, rows, requests, context).total / 1000)
            for rows in _grid(gpus)
        ),
        roots=_line(roots_us),
        layer=_line(layer_us),
        catch_up=_line(catch_up_us),
        control=Line(gpus.control_us / 1000, gpus.control_node_us / 1000),
    )


def _grid(gpus: Gpus) -> list[int]:
    """Rows at which the curve is evaluated: it is straight enough in between."""
    rows = set(range(1, 33)) | {round(32 * 1.1**i) for i in range(60)}
    return sorted(rows | {round(gpus.knee_rows())})


def _line(cost_us: Callable[[float], float]) -> Line:
    """Least squares over 1 to 512 nodes, evenly: the shape that a CostCurve has room for."""
    nodes = np.linspace(1, 512, 64)
    each, fixed = np.polyfit(nodes, [cost_us(n) / 1000 for n in nodes], 1)
    return Line(float(fixed), float(each))
