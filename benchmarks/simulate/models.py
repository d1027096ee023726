# SPDX-License-Identifier: Apache-2.0
"""Shapes of the models that the paper measured.

From each model's public ``config.json`` (hidden_size, num_hidden_layers, num_attention_heads,
num_key_value_heads, head_dim, intermediate_size, vocab_size; num_experts, num_experts_per_tok and
moe_intermediate_size of the mixture); the test adds the parameters up to the names' sizes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """A decoder of equal layers, bf16, with an output layer of its own."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    """Width of the gated MLP; of the draft head's too, also where the target is a mixture."""
    vocab: int
    head_dim: int = 128
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0

    @property
    def attention_weights(self) -> int:
        """Of one layer: the projections to query, key, value, and back."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Of one expert of one layer; a dense MLP is the only expert of its layer."""
        return 3 * self.hidden * (self.expert_ffn or self.ffn)

    @property
    def output_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights but norms and routers."""
        layer = self.attention_weights + max(1, self.experts) * self.expert_weights
        return self.layers * layer + 2 * self.output_weights

    def distinct_experts(self, rows: float) -> float:
        """Experts of a layer that ``rows`` rows are expected to reach, each choosing its own
        evenly and independently of the others."""
        if not self.experts:
            return 1.0
        share = self.experts_per_token / self.experts
        return self.experts * (1 - (1 - share) ** rows)


@dataclass(frozen=True)
class Head:
    """Weights of an EAGLE-3 head: one decoder layer whose attention reads token and state."""

    layer: int
    fusion: int
    """Three hidden states of the target to one."""
    output: int


DRAFT_VOCAB = 32_000


def eagle3_head(model: Model) -> Head:
    """The usual head of ``model``: its widths, and a draft vocabulary of 32,000."""
    attention = model.attention_weights
    attention += model.hidden * model.head_dim * (model.heads + 2 * model.kv_heads)
    return Head(
        layer=attention + 3 * model.hidden * model.ffn,
        fusion=3 * model.hidden * model.hidden,
        output=DRAFT_VOCAB * model.hidden,
    )


MODELS = {
    model.name: model
    for model in (
        Model("Llama-3.1-8B", 32, 4096, 32, 8, 14_336, 128_256),
        Model("Llama-3.3-70B", 80, 8192, 64, 8, 28_672, 128_256),
        Model("Qwen3-8B", 36, 4096, 32, 8, 12_288, 151_936),
        Model("Qwen3-32B", 64, 5120, 64, 8, 25_600, 151_936),
        Model(
            "Qwen3-235B-A22B",
            layers=94,
            hidden=4096,
            heads=64,
            kv_heads=4,
            ffn=12_288,
            vocab=151_936,
            experts=128,
            experts_per_token=8,
            expert_ffn=1536,
        ),
        Model("Vicuna-13B", 40, 5120, 40, 40, 13_824, 32_000),
    )
}
