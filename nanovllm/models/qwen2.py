"""`Qwen2ForCausalLM`."""

from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import LlamaAttention, LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 and Qwen2.5: biases on queries, keys and values."""

    @staticmethod
    def make_attention(config: ModelConfig, layer_id: int) -> LlamaAttention:
        return LlamaAttention(config, layer_id, qkv_bias=True)
