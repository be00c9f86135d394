"""Which class computes which architecture. A model's module is imported when it is chosen."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.models.llama import LlamaForCausalLM

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "nanovllm.models.llama",
    "MistralForCausalLM": "nanovllm.models.mistral",
    "Qwen2ForCausalLM": "nanovllm.models.qwen2",
    "Qwen3ForCausalLM": "nanovllm.models.qwen3",
}


def model_class(architecture: str) -> "type[LlamaForCausalLM]":
    """Return the class of a supported architecture."""
    cls: type[LlamaForCausalLM] = getattr(
        import_module(SUPPORTED_ARCHITECTURES[architecture]), architecture
    )
    return cls
