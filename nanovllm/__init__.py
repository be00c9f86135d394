"""nanovllm: long prompts, the KV cache where there is room, only the attention that matters.

`LLM` and `SamplingParams` are all that most programs need. Importing this package imports neither
torch nor transformers; the first use of a name does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.errors import BackendUnavailableError, CapacityError, ConfigError
    from nanovllm.kvcache.sparse.registry import SparsePolicyType
    from nanovllm.llm import LLM
    from nanovllm.outputs import RequestOutput, StreamOutput
    from nanovllm.sampling_params import SamplingParams

    FULL = SparsePolicyType.FULL
    XATTN_BSA = SparsePolicyType.XATTN_BSA
    QUEST = SparsePolicyType.QUEST
    STREAMING = SparsePolicyType.STREAMING

__version__ = "0.1.0"
__all__ = [
    "FULL",
    "LLM",
    "QUEST",
    "STREAMING",
    "XATTN_BSA",
    "BackendUnavailableError",
    "CapacityError",
    "ConfigError",
    "RequestOutput",
    "SamplingParams",
    "SparsePolicyType",
    "StreamOutput",
]

_HOME = {
    "LLM": "nanovllm.llm",
    "BackendUnavailableError": "nanovllm.errors",
    "CapacityError": "nanovllm.errors",
    "ConfigError": "nanovllm.errors",
    "RequestOutput": "nanovllm.outputs",
    "SamplingParams": "nanovllm.sampling_params",
    "SparsePolicyType": "nanovllm.kvcache.sparse.registry",
    "StreamOutput": "nanovllm.outputs",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    policies = import_module("nanovllm.kvcache.sparse.registry").SparsePolicyType
    if name in policies.__members__:
        return policies[name]
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
