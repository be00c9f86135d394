"""`MistralForCausalLM`."""

from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import LlamaAttention, LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral: a Llama that never has biases."""

    @staticmethod
    def make_attention(config: ModelConfig, layer_id: int) -> LlamaAttention:
        return LlamaAttention(config, layer_id)
