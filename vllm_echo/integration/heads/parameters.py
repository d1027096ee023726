# SPDX-License-Identifier: Apache-2.0
"""The parameters that vLLM's model of a head will have, by the head's form.

Names are those of the files in vLLM's spelling (``layers.0`` for ``midlayer``, no ``model.``
before them); a test compares the lists with the models that vLLM builds.
"""

from dataclasses import dataclass

from vllm_echo.integration.heads.form import HeadForm

Shape = tuple[int, ...]
STORED_TOGETHER = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""vLLM has these as one parameter, and takes them from a file in either form."""


@dataclass(frozen=True)
class Parameter:
    """A tensor that a head must or may have."""

    shape: Shape
    key: str | None = None
    """The key of config.json that asks for it; None where every head has it."""


def required_parameters(form: HeadForm) -> dict[str, Parameter]:
    """Those that nothing but the files can fill."""
    hidden, wide = form.hidden_size, form.target_hidden_size * form.num_aux_layers
    parameters = {"norm.weight": Parameter((hidden,))}
    if form.uses_aux_layers:
        parameters["fc.weight"] = Parameter((hidden, wide))
    if form.uses_aux_layers and form.norm_before_fc:
        parameters["input_norm.weight"] = Parameter((wide,), "norm_before_fc")
    if form.uses_aux_layers and form.fc_norm:
        for index in range(form.num_aux_layers):
            name = f"fc_norm.{index}.weight"
            parameters[name] = Parameter((form.target_hidden_size,), "fc_norm")
    for layer in range(form.num_hidden_layers):
        for name, parameter in _layer_parameters(form, layer).items():
            parameters[f"layers.{layer}.{name}"] = parameter
    return parameters


def optional_parameters(form: HeadForm) -> dict[str, Parameter]:
    """Those that may be taken from the target, and those that nothing reads."""
    hidden = form.hidden_size
    parameters = {
        "embed_tokens.weight": Parameter((form.vocab_size, hidden)),
        "lm_head.weight": Parameter((form.draft_vocab_size, hidden)),
        "d2t": Parameter((form.draft_vocab_size,)),
    }
    for layer in range(1, form.num_hidden_layers):
        parameters[f"layers.{layer}.hidden_norm.weight"] = Parameter((hidden,))
    return parameters


def _layer_parameters(form: HeadForm, layer: int) -> dict[str, Parameter]:
    hidden, ffn = form.hidden_size, form.intermediate_size
    queries = form.num_attention_heads * form.head_dim
    keys = form.num_key_value_heads * form.head_dim
    # The first layer reads the token's embedding beside the hidden state.
    inputs = hidden if layer else 2 * hidden
    attention, mlp = "attention_bias", "mlp_bias"
    # name: (rows, columns, has a bias, the key that says so)
    linears = {
        "self_attn.q_proj": (queries, inputs, form.qkv_bias, attention),
        "self_attn.k_proj": (keys, inputs, form.qkv_bias, attention),
        "self_attn.v_proj": (keys, inputs, form.qkv_bias, attention),
        "self_attn.o_proj": (hidden, queries, form.output_bias, attention),
        "mlp.gate_proj": (ffn, hidden, form.mlp_bias, mlp),
        "mlp.up_proj": (ffn, hidden, form.mlp_bias, mlp),
        "mlp.down_proj": (hidden, ffn, form.mlp_bias, mlp),
    }
    every_layer = "num_hidden_layers" if layer else None
    parameters = {}
    for name, (rows, columns, has_bias, key) in linears.items():
        parameters[f"{name}.weight"] = Parameter((rows, columns), every_layer)
        if has_bias:
            parameters[f"{name}.bias"] = Parameter((rows,), key)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if layer == 0:
        norms.append("hidden_norm")
    for name in norms:
        parameters[f"{name}.weight"] = Parameter((hidden,), every_layer)
    if form.query_key_norm:
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            parameters[f"{name}.weight"] = Parameter((form.head_dim,), "architectures")
    return parameters
