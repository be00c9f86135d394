"""The loop over layers of a step that takes all tokens through each layer at once."""

from itertools import pairwise
from typing import cast

import torch

from nanovllm.layers.attention import AttentionStep
from nanovllm.models.llama import DecoderLayer, LlamaForCausalLM


def forward(
    model: LlamaForCausalLM,
    token_ids: torch.Tensor,
    step: AttentionStep,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logits of some rows of a step's tokens, or of all.

    Args:
        model: the model.
        token_ids: int32 `[num_tokens]`.
        step: what attention needs.
        rows: int64, which tokens' logits; None for all.
    """
    layers = cast("list[DecoderLayer]", list(model.layers))
    hidden: torch.Tensor = model.embed_tokens(token_ids)
    residual = None
    for layer, following in pairwise(layers):
        normed, residual = layer.attend(hidden, residual, step)
        if step.looks_ahead:
            attention = following.self_attn
            normed_early = following.input_layernorm(residual)
            step.look_ahead(attention.layer_id, normed_early, attention.queries)
        hidden = layer.mlp(normed)
    # Nothing attends to the last layer's output: only rows that are sampled go on from there.
    hidden, residual = layers[-1](hidden, residual, step, rows)
    hidden, _ = model.norm.add(hidden, residual)
    logits: torch.Tensor = model.lm_head(hidden)
    return logits
