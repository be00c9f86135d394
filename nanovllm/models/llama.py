"""`LlamaForCausalLM`, and the decoder that the other architectures vary."""

import torch
from torch import nn

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.attention import AttentionStep
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.models.config import ModelConfig


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary embedding."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.num_q_heads = config.num_q_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        q_size, kv_size = (n * self.head_dim for n in (self.num_q_heads, self.num_kv_heads))
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=qkv_bias,
        )
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, bias=output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None

    def forward(
        self, hidden: torch.Tensor, step: AttentionStep, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Map `[num_tokens, hidden_size]` to the same, or to its `rows` only."""
        out = step.attend(self.layer_id, self._heads(hidden)).flatten(1)
        projected: torch.Tensor = self.o_proj(out if rows is None else out[rows])
        return projected

    def queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the queries without rotary embedding, `[num_tokens, num_q_heads, head_dim]`."""
        query: torch.Tensor = self.qkv_proj.part(hidden, "q_proj").unflatten(
            -1, (-1, self.head_dim)
        )
        if self.q_norm is not None:
            query = self.q_norm(query)
        return query

    def _heads(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values without rotary embedding.

        `[num_tokens, num_q_heads + 2 * num_kv_heads, head_dim]`.
        """
        heads: torch.Tensor = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query = heads[:, : self.num_q_heads]
            key = heads[:, self.num_q_heads : -self.num_kv_heads]
            query.copy_(self.q_norm(query))
            key.copy_(self.k_norm(key))
        return heads


class LlamaMLP(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, config: ModelConfig, bias: bool) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = Linear(
            config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=bias
        )
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, bias=bias)
        self.activation = SiluAndMul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[num_tokens, hidden_size]` to the same."""
        out: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(hidden)))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig, attention: LlamaAttention, mlp: LlamaMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        step: AttentionStep,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer adds to the residual stream, and the stream before that.

        Args:
            hidden: `[num_tokens, hidden_size]`, what the layer before adds.
            residual: the stream before that; None for the first layer.
            step: what attention needs.
            rows: the tokens whose result is wanted, integer `[n]`; None for all. Keys and values
                of the others are stored all the same.
        """
        normed, residual = self.attend(hidden, residual, step, rows)
        return self.mlp(normed), residual

    def attend(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        step: AttentionStep,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the MLP sees, and the residual stream before it; arguments as for a call."""
        normed, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(normed, step, rows)
        if rows is not None:
            residual = residual[rows]
        return self.post_attention_layernorm.add(hidden, residual)


class LlamaForCausalLM(nn.Module):
    """Llama 2 and 3, SmolLM2 and their kin."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config,
                self.make_attention(config, layer_id),
                LlamaMLP(config, bias=bool(getattr(config.hf, "mlp_bias", False))),
            )
            for layer_id in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size})

    @staticmethod
    def make_attention(config: ModelConfig, layer_id: int) -> LlamaAttention:
        """Make a layer's attention; what the architectures differ in."""
        bias = bool(getattr(config.hf, "attention_bias", False))
        return LlamaAttention(config, layer_id, qkv_bias=bias, output_bias=bias)
