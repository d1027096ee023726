# SPDX-License-Identifier: Apache-2.0
"""What `vllm-echo calibrate` found, for people: a table in Markdown, and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_echo.calibration.fit import DepthStatistics, GateCosts, LayerTable, Outcome
from vllm_echo.core.config import Gate


@dataclass
class CalibrationReport:
    """Everything that the report says; numbers of gates are for greedy requests."""

    title: str
    statistics: Sequence[DepthStatistics]
    gates: Sequence[Gate]
    remarks: Sequence[str]
    costs: GateCosts
    fitted: dict[str, Outcome]
    """Rule -> outcome on the prompts that the gates were fitted on."""
    held_out: dict[str, Outcome]
    """Rule -> outcome on other prompts."""
    calibration_error: dict[str, tuple[float, float]]
    """Kind -> mean gap between predicted and true acceptance, before and after calibration, on
    held-out prompts."""

    def markdown(self) -> str:
        thresholds = {gate.depth: gate.threshold for gate in self.gates}
        lines = [
            f"# {self.title}",
            "",
            "Confidence of the best path by depth, greedy requests, all prompts; every fourth "
            "request takes no part in the fit.",
        ]
        lines += [
            "",
            "| depth | accepted | rejected | AUC | gate before it |",
            "|---|---|---|---|---|",
        ]
        for s in self.statistics:
            auc = f"{s.auc:.3f}" if s.auc is not None else s.problem
            gate = thresholds.get(s.depth - 1)
            shown = f"depth {s.depth - 1}: c > {gate:.2f}" if gate is not None else ""
            lines.append(f"| {s.depth} | {s.num_accepted} | {s.num_rejected} | {auc} | {shown} |")
        lines += ["", f"Fitted for a node that costs {self.costs.node:.3f} and a layer that costs "]
        lines[-1] += f"{self.costs.layer:.3f} of a request's share of a plain step."
        lines += ["", *self._outcomes("Prompts of the fit", self.fitted)]
        lines += ["", *self._outcomes("Held-out prompts", self.held_out)]
        lines += ["", "| calibration error, held out | head's word | calibrated |", "|---|---|---|"]
        for kind, (before, after) in self.calibration_error.items():
            lines.append(f"| {kind} | {before:.4f} | {after:.4f} |")
        if self.remarks:
            lines += ["", *(f"- {remark}" for remark in self.remarks)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def _outcomes(name: str, outcomes: dict[str, Outcome]) -> list[str]:
        lines = [
            f"| {name} | tokens per time | accepted | nodes | layers |",
            "|---|---|---|---|---|",
        ]
        for rule, o in outcomes.items():
            values = (o.objective, o.accepted, o.nodes, o.layers)
            lines.append(f"| {rule} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
        return lines


def plot_confidences(
    path: Path, title: str, table: LayerTable, gates: Sequence[Gate], auc: Sequence[float | None]
) -> None:
    """Accepted against rejected confidence by depth, with AUC and thresholds, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    max_depth = table.confidence.shape[1]
    thresholds = {gate.depth + 1: gate.threshold for gate in gates}
    figure, axes = pyplot.subplots(figsize=(1.6 * max_depth + 2, 4.5))
    for shift, name, color, which in (
        (-0.18, "accepted", "tab:green", 0),
        (0.18, "rejected", "tab:red", 1),
    ):
        groups = [table.samples(depth)[which] for depth in range(1, max_depth + 1)]
        places = [depth + shift for depth in range(1, max_depth + 1)]
        shown = [
            (g, p) for g, p in zip(groups, places, strict=True) if len(g) > 1 and np.ptp(g) > 0
        ]
        if shown:
            parts = axes.violinplot(
                [g for g, _ in shown], [p for _, p in shown], widths=0.32, showmedians=True
            )
            pyplot.setp(parts["bodies"], facecolor=color)
            for line in ("cmedians", "cmins", "cmaxes", "cbars"):
                parts[line].set_color(color)
        axes.plot([], [], color=color, label=name)
    for depth, threshold in thresholds.items():
        axes.hlines(threshold, depth - 0.42, depth + 0.42, colors="black", linestyles="dashed")
        axes.text(depth, min(1.0, threshold + 0.02), f"> {threshold:.2f}", ha="center", fontsize=8)
    for depth, value in enumerate(auc, start=1):
        text = f"AUC {value:.2f}" if value is not None else "too few"
        axes.text(depth, 1.06, text, ha="center", fontsize=8)
    axes.set_xticks(range(1, max_depth + 1))
    axes.set_xlabel("depth")
    axes.set_ylabel("confidence of the best path")
    axes.set_ylim(0, 1.12)
    axes.set_title(title, fontsize=10)
    axes.legend(loc="center right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
