"""The plain-torch truth of every op: what a kernel must compute, in the fewest lines."""

import torch


def attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention and LSE in fp32 (fp64 for fp64 inputs), bottom-right causal.

    Shapes as in `AttentionBackend.attend`. Memory grows with `q_len * k_len`.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[2] // key.shape[2]
    q = query.to(wide).transpose(1, 2)
    k, v = (t.to(wide).transpose(1, 2).repeat_interleave(group, 1) for t in (key, value))
    # [batch, num_q_heads, q_len, k_len]
    logits = (q @ k.mT) * softmax_scale
    if causal:
        q_len, k_len = logits.shape[-2:]
        hidden = torch.ones(q_len, k_len, dtype=torch.bool, device=query.device)
        logits = logits.masked_fill(hidden.triu(k_len - q_len + 1), float("-inf"))
    lse = logits.logsumexp(-1)
    out = (logits - lse[..., None]).exp() @ v
    return out.transpose(1, 2).to(query.dtype), lse


def merge_attention_outputs(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys, in fp32. Shapes as in `ops.attention`."""
    lse = torch.logaddexp(lse_a, lse_b)
    finite = torch.where(lse == float("-inf"), 0.0, lse)

    # [batch, q_len, num_heads, 1]
    def share(part: torch.Tensor) -> torch.Tensor:
        return (part - finite).exp().transpose(1, 2)[..., None]

    # A set without keys may bring anything, NaN too: its share is 0 and must stay so.
    def part(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.where(weight > 0, out.float() * weight, 0.0)

    merged = part(out_a, share(lse_a)) + part(out_b, share(lse_b))
    return merged.to(out_a.dtype), lse


def paged_decode_attention_with_lse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one query a sequence to its paged cache. Shapes as in `ops.paged_attention`."""
    outs, lses = [], []
    for q, table, length in zip(query, block_tables, context_lens.tolist(), strict=True):
        keys, values = (c[table.long()].flatten(0, 1)[:length] for c in (key_cache, value_cache))
        out, lse = attention_with_lse(q[None, None], keys[None], values[None], softmax_scale, False)
        outs.append(out[0, 0])
        lses.append(lse[0, :, 0])
    return torch.stack(outs), torch.stack(lses)


def pack_blocks(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """View `[num_tokens, heads, dim]` as head-major blocks `[num_blocks, heads, block_size, dim]`.

    `num_tokens` is a multiple of `block_size`.
    """
    num_tokens, num_heads, dim = tokens.shape
    return tokens.view(num_tokens // block_size, block_size, num_heads, dim).transpose(1, 2)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale rows of `x` to unit root mean square, then by `weight`; computed in fp32."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` for `gate_up`, `[..., 2 * n]` with the gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + head_dim/2) of `[n, heads, head_dim]` by angles `[n, head_dim/2]`."""
    first, second = x.float().chunk(2, dim=-1)
    c, s = cos[:, None].float(), sin[:, None].float()
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)
