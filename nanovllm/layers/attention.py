"""The attention layer: stores keys and values, then lets the policy attend."""

from dataclasses import dataclass

import torch

from nanovllm.kvcache.attention_batch import AttentionBatch
from nanovllm.kvcache.resident import LayerKV
from nanovllm.kvcache.sparse.policy import PolicyContext, SparsePolicy
from nanovllm.ops.backends import AttentionBackend
from nanovllm.ops.elementwise import rotate_and_store


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What attention needs in one step, handed down through the layers."""

    batch: AttentionBatch
    cache: list[LayerKV]
    policy: SparsePolicy
    backend: AttentionBackend
    cos: torch.Tensor
    """fp32 `[num_tokens, head_dim / 2]`: rotary angles of the step's tokens."""
    sin: torch.Tensor


def attend(step: AttentionStep, layer_id: int, heads: torch.Tensor) -> torch.Tensor:
    """Store a step's keys and values in the cache and attend each token to its sequence.

    Args:
        step: the step's batch, cache, policy and backend.
        layer_id: which layer of the cache.
        heads: `[num_tokens, num_q_heads + 2 * num_kv_heads, head_dim]`: queries, keys and values
            without rotary embedding. Overwritten.

    Returns:
        `[num_tokens, num_q_heads, head_dim]`, contiguous. Does not synchronise with the host.
    """
    layer_kv = step.cache[layer_id]
    batch, policy = step.batch, step.policy
    query = rotate_and_store(
        heads, layer_kv.keys, layer_kv.values, batch.slot_mapping, step.cos, step.sin
    )
    scale = query.shape[-1] ** -0.5
    outputs = []
    for segment in batch.prefills:
        ctx = PolicyContext(
            layer_id=layer_id,
            query=query[segment.rows],
            num_history_tokens=segment.num_history_tokens,
            block_size=segment.block_size,
            softmax_scale=scale,
            backend=step.backend,
        )
        outputs.append(policy.compute_prefill(layer_kv, segment, ctx))
    if (decodes := batch.decodes) is not None:
        outputs.append(policy.compute_decode(query[decodes.rows], layer_kv, decodes, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
