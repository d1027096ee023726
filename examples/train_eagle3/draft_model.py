# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 head as it is trained: one decoder layer over the target's hidden states.

It computes what vLLM's ``LlamaForCausalLMEagle3`` computes, with ``norm_before_residual`` and
``fc_norm`` set, and its parameters carry vLLM's names. Training unrolls several drafting steps
("training-time test"): in step k the head reads its own hidden state of step k - 1 where step 0
reads the target's.

Rows. A row is a drafting start: row t of a chat stands for "the target has processed x_0 ... x_t,
and x_{t+1} is known". In step k the row reads the token x_{t+1+k} at rotary position t + k and
foresees x_{t+2+k}. It attends to the step-0 keys of positions <= t and to its own keys of steps
1 ... k, exactly what the KV cache holds when the head drafts a chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COMPUTE = torch.bfloat16


@dataclass(frozen=True)
class HeadShape:
    """Sizes of the head, as in its config.json."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    rope_theta: float
    rms_norm_eps: float


@dataclass
class Batch:
    """Chats of one optimiser step, flattened; see the module's text for what a row is.

    N context rows (every position with two successors), M answer rows (those of them whose token
    x_{t+1} belongs to the answer), both chat after chat.
    """

    aux: Tensor  # [N, 3 * hidden] bf16, the target's hidden states at t
    next_ids: Tensor  # [N] token x_{t+1}
    positions: Tensor  # [N] t
    slots: Tensor  # [N] place of the row in a [chats, columns] grid
    answer: Tensor  # [M] context row of each answer row
    chat: Tensor  # [M] chat of each answer row
    end: Tensor  # [M] one past the last answer row of the same chat
    first_column: Tensor  # [chats] first used column of each chat
    columns: int  # width of the grid
    final: Tensor  # [M, hidden] bf16, the target's last hidden state at t + 1
    labels: Tensor  # [M] token x_{t+2}


class RMSNorm(nn.Module):
    """Root mean square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * scale * self.weight).to(COMPUTE)


class Linear(nn.Module):
    """A projection without bias: fp32 master weight, bf16 product.

    ``refresh`` makes the bf16 copy that all drafting steps of one batch share.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.normal_(self.weight, std=inputs**-0.5)
        self.rounded: Tensor | None = None

    def refresh(self) -> None:
        self.rounded = self.weight.to(COMPUTE)

    def forward(self, x: Tensor) -> Tensor:
        assert self.rounded is not None, "refresh() comes before the first use in a batch"
        return F.linear(x.to(COMPUTE), self.rounded)


class Attention(nn.Module):
    """Projections of the attention; the attention itself is in ``DraftHead``."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.q_proj = Linear(2 * shape.hidden_size, shape.heads * shape.head_dim)
        self.k_proj = Linear(2 * shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.v_proj = Linear(2 * shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.hidden_size)


class MLP(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """Parameters of the head's only decoder layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)


class DraftHead(nn.Module):
    """The head and its training loss.

    Args:
        shape: sizes.
        embedding: [vocab, hidden] bf16, the target's, shared and not trained.
        target_ids: [draft_vocab] target token of each draft token, ascending.
    """

    def __init__(self, shape: HeadShape, embedding: Tensor, target_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc_norm = nn.ModuleList(
            [RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in shape.aux_layers]
        )
        self.fc = Linear(len(shape.aux_layers) * shape.hidden_size, shape.hidden_size)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = Linear(shape.hidden_size, shape.draft_vocab_size)
        self.register_buffer("embedding", embedding.to(COMPUTE), persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)
        draft_ids = torch.full((embedding.shape[0],), -1, dtype=torch.long)
        draft_ids[target_ids] = torch.arange(len(target_ids))
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("target_rows", self.embedding[target_ids], persistent=False)

    @torch.no_grad()
    def start_from_target(self, target: nn.Module) -> None:
        """Starts with the target's output rows and final norm, and with quiet layer outputs.

        Small output projections let the first steps work through the residual; starting from a
        decoder layer of the target was tried and is worse.
        """
        self.lm_head.weight.copy_(self.target_rows)
        self.norm.weight.copy_(target.model.norm.weight)
        for quiet in (self.midlayer.self_attn.o_proj, self.midlayer.mlp.down_proj):
            quiet.weight.mul_(0.3)

    def combine(self, aux: Tensor) -> Tensor:
        """[rows, 3 * hidden] hidden states of the target -> [rows, hidden] of the head."""
        chunks = aux.chunk(len(self.fc_norm), dim=-1)
        normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
        return self.fc(torch.cat(normed, dim=-1))

    def layer_input(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Attention input [rows, 2 * hidden] and residual [rows, hidden]."""
        hidden = self.midlayer.hidden_norm(hidden)
        embeds = self.midlayer.input_layernorm(self.embedding[ids])
        return torch.cat([embeds, hidden], dim=-1), hidden

    def layer_output(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised output for the lm_head, and hidden state for the next step, [rows, hidden]."""
        residual = residual + self.midlayer.self_attn.o_proj(attended)
        hidden = self.midlayer.post_attention_layernorm(residual)
        residual = residual + self.midlayer.mlp(hidden)
        return self.norm(residual), residual

    def loss(
        self, batch: Batch, steps: int, decay: float, hard_weight: float, min_path: float
    ) -> tuple[Tensor, list[dict[str, float]]]:
        """Training-time test: cross entropy with the target's distribution over ``steps`` steps.

        A row goes on to the next step while the head would plausibly draft there: while the product
        of the probabilities that it gave to the true tokens is at least ``min_path``.

        Args:
            batch: the chats.
            steps: simulated drafting steps.
            decay: weight of step k is ``decay ** k``.
            hard_weight: share of the one-hot true token in the target distribution.
            min_path: least path probability to go on.

        Returns:
            The loss per answer row, and per step: rows, rows drafted right, rows right in all
            steps so far, sum of the losses.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.refresh()
        target = self._target_distribution(batch.final)
        labels = self.draft_ids[batch.labels]
        answer_ids = batch.next_ids[batch.answer]
        answer_positions = batch.positions[batch.answer]
        context, residual = self.layer_input(self.combine(batch.aux), batch.next_ids)
        keys = rotary(self._heads(self.midlayer.self_attn.k_proj(context)), batch.positions, self)
        values = self._heads(self.midlayer.self_attn.v_proj(context))
        grid = KeyGrid(batch, keys, values)

        rows = torch.arange(len(batch.answer))
        x, residual = context[batch.answer], residual[batch.answer]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        path = torch.ones(len(rows))
        right = torch.ones(len(rows), dtype=torch.bool)
        total = torch.zeros(())
        report = []
        for step in range(steps):
            attention = self.midlayer.self_attn
            place = answer_positions[rows] + step
            q = rotary(self._heads(attention.q_proj(x)), place, self)
            if step > 0:
                own_keys.append(rotary(self._heads(attention.k_proj(x)), place, self))
                own_values.append(self._heads(attention.v_proj(x)))
            attended = grid.attend(rows, q, own_keys, own_values)
            output, hidden = self.layer_output(attended, residual)
            value, drafted_right, probability = SoftTargetLoss.apply(
                output,
                self.lm_head.weight,
                self.lm_head.rounded,
                target,
                rows + step,
                labels[rows + step],
                hard_weight,
            )
            total = total + decay**step * value
            right = right & drafted_right
            report.append(_step_report(value, drafted_right, right))
            path = path * probability
            going = (path >= min_path) & (rows + step + 1 < batch.end[rows])
            kept = going.nonzero().squeeze(1)
            if step + 1 == steps or len(kept) == 0:
                break
            rows, path, right = rows[kept], path[kept], right[kept]
            own_keys = [key[kept] for key in own_keys]
            own_values = [own[kept] for own in own_values]
            x, residual = self.layer_input(hidden[kept], answer_ids[rows + step + 1])
        return total / len(batch.answer), report

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.shape.head_dim)

    @torch.no_grad()
    def _target_distribution(self, final: Tensor) -> Tensor:
        """[M, draft_vocab] bf16: the target's distribution among the draft's tokens."""
        parts = [F.linear(part, self.target_rows).float() for part in final.split(1024)]
        return torch.cat([part.softmax(-1).to(COMPUTE) for part in parts])


def _step_report(value: Tensor, drafted_right: Tensor, right: Tensor) -> dict[str, float]:
    return {
        "rows": len(drafted_right),
        "right": int(drafted_right.sum()),
        "path_right": int(right.sum()),
        "loss": float(value.detach()),
    }


class KeyGrid:
    """Step-0 keys and values of all chats in a padded grid, and attention over it.

    Prompts are padded on the left and answers on the right, so that answers begin in one column.

    Args:
        batch: the chats.
        keys: [N, kv_heads, head_dim].
        values: [N, kv_heads, head_dim].
    """

    def __init__(self, batch: Batch, keys: Tensor, values: Tensor) -> None:
        self.batch = batch
        self.row_column = batch.slots[batch.answer] % batch.columns  # [M]
        self.keys = self._grid(keys)
        self.values = self._grid(values)

    def _grid(self, rows: Tensor) -> Tensor:
        """[N, kv_heads, head_dim] -> [chats, kv_heads, columns, head_dim]."""
        chats = len(self.batch.first_column)
        empty = rows.new_zeros(chats * self.batch.columns, *rows.shape[1:])
        filled = empty.index_copy(0, self.batch.slots, rows)
        return filled.view(chats, self.batch.columns, *rows.shape[1:]).transpose(1, 2)

    def attend(
        self, rows: Tensor, q: Tensor, own_keys: list[Tensor], own_values: list[Tensor]
    ) -> Tensor:
        """Attention of answer rows over step-0 keys and their own keys of later steps.

        Args:
            rows: [R] ascending answer rows.
            q: [R, heads, head_dim] rotated queries.
            own_keys: per later step [R, kv_heads, head_dim].
            own_values: likewise.

        Returns:
            [R, heads * head_dim].
        """
        chats, kv_heads, columns, head_dim = self.keys.shape
        group = q.shape[1] // kv_heads
        chat = self.batch.chat[rows]
        counts = torch.bincount(chat, minlength=chats)
        rank = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[chat]
        width = int(counts.max())
        place = chat * width + rank  # of each row in a [chats, width] grid

        q = q.view(len(rows), kv_heads, group, head_dim) * head_dim**-0.5
        spread = q.new_zeros(chats * width, kv_heads, group, head_dim).index_copy(0, place, q)
        spread = spread.view(chats, width, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        flat = spread.reshape(chats, kv_heads, group * width, head_dim)
        scores = flat @ self.keys.transpose(2, 3)
        scores = scores.view(chats, kv_heads, group, width, columns)
        scores = scores.masked_fill(self._hidden(rows, place, width), float("-inf"))
        if own_keys:
            own = torch.stack([(q * key.unsqueeze(2)).sum(-1) for key in own_keys], dim=-1)
            own = own.new_zeros(chats * width, *own.shape[1:]).index_copy(0, place, own)
            own = own.view(chats, width, kv_heads, group, -1).permute(0, 2, 3, 1, 4)
            scores = torch.cat([scores, own], dim=-1)
        weights = scores.softmax(dim=-1)
        shared = weights[..., :columns].reshape(chats, kv_heads, group * width, columns)
        mixed = (shared @ self.values).view(chats, kv_heads, group, width, head_dim)
        mixed = mixed.permute(0, 3, 1, 2, 4).reshape(chats * width, kv_heads, group, head_dim)[
            place
        ]
        if own_keys:
            share = weights[..., columns:].permute(0, 3, 1, 2, 4)
            share = share.reshape(chats * width, kv_heads, group, -1)[place]
            for number, value in enumerate(own_values):
                mixed = mixed + share[..., number : number + 1] * value.unsqueeze(2)
        return mixed.reshape(len(rows), -1)

    def _hidden(self, rows: Tensor, place: Tensor, width: int) -> Tensor:
        """[chats, 1, 1, width, columns] bool: keys that a row must not see."""
        chats = len(self.batch.first_column)
        last = torch.full((chats * width,), self.batch.columns - 1)
        last[place] = self.row_column[rows]
        column = torch.arange(self.batch.columns)
        late = column > last.view(chats, width, 1)
        padding = column < self.batch.first_column.view(chats, 1, 1)
        return (late | padding)[:, None, None]


def rotary(x: Tensor, positions: Tensor, head: DraftHead) -> Tensor:
    """Rotates [rows, heads, head_dim] by position; dimension i pairs with i + head_dim / 2."""
    half = x.shape[-1] // 2
    frequency = head.shape.rope_theta ** (-torch.arange(half).float() / half)
    angle = positions.float().unsqueeze(1) * frequency
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half:].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


class SoftTargetLoss(torch.autograd.Function):
    """Output layer and cross entropy with a soft target in one pass, a chunk of rows at a time.

    The gradients are computed along with the loss, so logits are never kept.
    """

    CHUNK = 1024

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        weight: Tensor,
        matrix: Tensor,
        target: Tensor,
        target_row: Tensor,
        label: Tensor,
        hard_weight: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss over the rows whose true token is in the draft vocabulary.

        Args:
            output: [R, hidden] bf16, the head's normalised output.
            weight: [draft_vocab, hidden] fp32 of the output layer, which gets the gradient.
            matrix: the same in bf16.
            target: [M, draft_vocab] bf16, target distributions.
            target_row: [R] row of ``target`` for each row.
            label: [R] true draft token, -1 if it is not in the draft vocabulary.
            hard_weight: share of the one-hot label in the target.

        Returns:
            The summed loss; [R] bool, whether the most probable token is the true one; [R] fp32
            probability of the true token (0 outside the draft vocabulary).
        """
        grad_output = torch.empty_like(output)
        grad_weight = torch.zeros_like(weight)
        loss = torch.zeros(())
        right, probability = [], []
        for start in range(0, len(output), SoftTargetLoss.CHUNK):
            part = slice(start, start + SoftTargetLoss.CHUNK)
            known = label[part] >= 0
            one_hot = label[part].clamp(min=0).unsqueeze(1)
            logits = F.linear(output[part], matrix).float()
            log_sum = logits.logsumexp(-1, keepdim=True)
            soft = target[target_row[part]].float()
            true_logit = logits.gather(1, one_hot)
            expected = (1 - hard_weight) * (soft * logits).sum(-1) + hard_weight * true_logit[:, 0]
            loss = loss + ((log_sum[:, 0] - expected) * known).sum()
            right.append((logits.argmax(-1) == label[part]) & known)
            probability.append((true_logit - log_sum)[:, 0].exp() * known)
            grad = logits.sub_(log_sum).exp_().sub_(soft.mul_(1 - hard_weight))
            grad.scatter_add_(1, one_hot, torch.full(one_hot.shape, -hard_weight))
            grad = grad.mul_(known.unsqueeze(1)).to(COMPUTE)
            grad_output[part] = grad @ matrix
            grad_weight += grad.T @ output[part]
        ctx.save_for_backward(grad_output, grad_weight)
        right_rows, probabilities = torch.cat(right), torch.cat(probability)
        ctx.mark_non_differentiable(right_rows, probabilities)
        return loss, right_rows, probabilities

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Scales the stored gradients."""
        grad_output, grad_weight = ctx.saved_tensors
        scale = float(grad_loss)
        return grad_output * scale, grad_weight * scale, None, None, None, None, None
