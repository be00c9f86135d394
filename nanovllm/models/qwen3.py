"""`Qwen3ForCausalLM`."""

from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3: queries and keys are normalised by head before the rotary embedding."""

    @staticmethod
    def make_attention(config: ModelConfig, layer_id: int) -> LlamaAttention:
        bias = bool(getattr(config.hf, "attention_bias", False))
        return LlamaAttention(config, layer_id, qkv_bias=bias, output_bias=bias, qk_norm=True)
