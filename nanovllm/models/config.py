"""What a checkpoint's `config.json` says, checked and under one set of names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from nanovllm.errors import ConfigError
from nanovllm.models.registry import SUPPORTED_ARCHITECTURES


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Positions the model was made for."""
    sliding_window: int | None
    """Tokens that some layer looks back, where that is fewer than all."""
    dtype: str
    """The checkpoint's dtype; float32 if it names none."""
    hf: PretrainedConfig
    """The whole config as transformers reads it, defaults filled in."""


def load_model_config(directory: Path) -> ModelConfig:
    """Read `config.json` of a model directory.

    Raises:
        ConfigError: the directory or its config is missing, unreadable or not supported; the
            message names the path or key at fault.
    """
    raw = _read_config_json(directory)
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"{directory / 'config.json'}: architecture {architecture!r} is not supported. "
            f"Supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    try:
        hf = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{directory / 'config.json'} is not valid: {error}") from error
    if quantization := raw.get("quantization_config"):
        raise ConfigError(
            f"config.json: quantization_config is not supported: {str(quantization)[:80]}. Use the "
            "checkpoint that was quantised"
        )
    if hf.hidden_act != "silu":
        raise ConfigError(f"config.json: hidden_act {hf.hidden_act!r} is not supported, only silu")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {hf.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {hf.num_key_value_heads}"
        )
    return ModelConfig(
        architecture=architecture,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_q_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=hf.vocab_size,
        rms_norm_eps=hf.rms_norm_eps,
        tie_word_embeddings=hf.tie_word_embeddings,
        max_position_embeddings=hf.max_position_embeddings,
        sliding_window=_sliding_window(architecture, hf),
        dtype=str(hf.dtype or "float32").removeprefix("torch."),
        hf=hf,
    )


def _sliding_window(architecture: str, hf: PretrainedConfig) -> int | None:
    """Read the window as transformers' models do: Llama ignores it, Mistral its `layer_types`."""
    if architecture == "LlamaForCausalLM" or not hf.sliding_window:
        return None
    slides = architecture == "MistralForCausalLM" or "sliding_attention" in hf.layer_types
    return int(hf.sliding_window) if slides else None


def _read_config_json(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not directory.exists():
        raise ConfigError(
            f"model directory {directory} does not exist. nanovllm reads local Hugging Face "
            'directories (config.json, *.safetensors, tokenizer.json) and "demo".'
        )
    if not directory.is_dir():
        raise ConfigError(f"model {directory} is a file; give the directory that holds config.json")
    if not path.is_file():
        raise ConfigError(f"model directory {directory} has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds {type(raw).__name__}, not an object")
    return raw
