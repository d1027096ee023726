# SPDX-License-Identifier: Apache-2.0
"""Keeps the hidden states that the target computes while vLLM generates its answers.

Decoding computes every hidden state that head training needs, so a second pass of the target over
its answers can be spared. vLLM hands out the inputs of chosen layers to EAGLE-3 drafters; here the
same outlet is opened without a drafter, and each forward's rows are filed by request.
"""

from __future__ import annotations

from typing import Any

import torch


class HiddenStateCapture:
    """Collects per-request hidden states inside vLLM's CPU model runner.

    Use ``install`` before the engine is made. Prefix caching must be off: a token that is not
    computed has no hidden state.
    """

    def __init__(self, aux_layers: tuple[int, ...]) -> None:
        self.aux_layers = aux_layers
        self.rows: dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}

    def install(self) -> None:
        """Makes model runners created from now on report to this object."""
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        capture = self
        make_runner = CPUModelRunner.__init__
        run_forward = CPUModelRunner._model_forward

        def init(runner: Any, *args: Any, **kwargs: Any) -> None:
            make_runner(runner, *args, **kwargs)
            runner.use_aux_hidden_state_outputs = True
            runner._get_eagle3_aux_layers_from_config = lambda: capture.aux_layers

        def forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
            output = run_forward(runner, *args, **kwargs)
            capture._file(runner, *output)
            return output

        CPUModelRunner.__init__ = init
        CPUModelRunner._model_forward = forward

    def _file(self, runner: Any, final: torch.Tensor, aux: list[torch.Tensor]) -> None:
        """Files one forward's rows under their requests, with the position of the first row."""
        batch = runner.input_batch
        joined = torch.cat(aux, dim=-1)
        bounds = runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        for i, request in enumerate(batch.req_ids):
            part = slice(bounds[i], bounds[i + 1])
            first = int(batch.num_computed_tokens_cpu[i])
            # Requests get a random suffix inside the engine; callers know only what is before it.
            rows = self.rows.setdefault(request.rpartition("-")[0] or request, [])
            rows.append((first, joined[part].clone(), final[part].clone()))

    def take(self, request: str, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Removes and returns what was filed for a finished request.

        Args:
            request: its id.
            length: tokens whose hidden states are expected, from position 0.

        Returns:
            [length, layers * hidden] and [length, hidden], or None if rows are missing. Positions
            that were computed twice (after a preemption) keep the later rows.
        """
        filed = self.rows.pop(request, [])
        if not filed:
            return None
        aux = filed[0][1].new_empty(length, filed[0][1].shape[1])
        final = filed[0][2].new_empty(length, filed[0][2].shape[1])
        seen = torch.zeros(length, dtype=torch.bool)
        for first, aux_rows, final_rows in filed:
            count = min(len(aux_rows), length - first)
            if count > 0:
                aux[first : first + count] = aux_rows[:count]
                final[first : first + count] = final_rows[:count]
                seen[first : first + count] = True
        return (aux, final) if bool(seen.all()) else None
