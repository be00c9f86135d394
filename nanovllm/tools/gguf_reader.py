"""Read a GGUF file of a Llama-family model as the parts of a Hugging Face model directory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

# `general.architecture` -> (`model_type`, class) of transformers
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
# Only these have their query and key rows stored in another order.
_PERMUTED_ARCHITECTURES = ("llama",)

_TOP_LEVEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Splits that are the GPT-2 regex, which `tokenizers` has built in. llama.cpp's "smollm" also
# isolates digits; transformers' GGUF loading does not, and we give the same tokens as it. They
# differ only where two or more white-space characters stand before a digit.
_GPT2_SPLITS = ("gpt-2", "smollm")
_CONTROL, _USER_DEFINED = 3, 4  # of `tokenizer.ggml.token_type`


class GgufModel:
    """The config, weights and tokenizer of a GGUF file, under the names that transformers uses.

    Args:
        path: a GGUF file with architecture llama, qwen2 or qwen3, quantised in any way that the
            `gguf` package can undo. It is memory-mapped; constructing reads the metadata only.

    Raises:
        ConfigError: not a GGUF file, or of another architecture.
        BackendUnavailableError: the `gguf` package is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise BackendUnavailableError(
                "reading GGUF files needs the gguf package: pip install gguf"
            ) from error
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise ConfigError(f"{path} cannot be read as a GGUF file: {error}") from error
        self._path = path
        self._metadata = {name: field.contents() for name, field in self._reader.fields.items()}
        self.architecture = str(self._metadata.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ConfigError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported, "
                f"only {', '.join(_ARCHITECTURES)}"
            )

    @property
    def num_tensors(self) -> int:
        """How many tensors `tensors` yields."""
        return len(self._reader.tensors)

    def config(self) -> dict[str, Any]:
        """Return what `config.json` holds, without a dtype.

        Raises:
            ConfigError: a needed key is missing, or the file scales its rotary embedding.
        """
        if self._of_model("rope.scaling.type", "none") != "none":
            raise ConfigError(f"{self._path}: {self.architecture}.rope.scaling is not supported")
        model_type, architecture = _ARCHITECTURES[self.architecture]
        shapes = {tensor.name: tensor.shape.tolist() for tensor in self._reader.tensors}
        hidden_size, vocab_size = shapes["token_embd.weight"]
        num_heads = self._of_model("attention.head_count")
        config = {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": self._of_model("feed_forward_length"),
            "num_hidden_layers": self._of_model("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._of_model("attention.head_count_kv", num_heads),
            "head_dim": self._of_model("attention.key_length", hidden_size // num_heads),
            "hidden_act": "silu",
            "rms_norm_eps": _short(self._of_model("attention.layer_norm_rms_epsilon")),
            "rope_theta": _short(self._of_model("rope.freq_base", 10000.0)),
            "max_position_embeddings": self._of_model("context_length"),
            "tie_word_embeddings": "output.weight" not in shapes,
            "attention_bias": "blk.0.attn_q.bias" in shapes,
        }
        return config | self._special_token_ids()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's Hugging Face name and its dequantised value, fp32, one at a time.

        Raises:
            ConfigError: a tensor has no Hugging Face name (such as those of experts).
        """
        import gguf
        import torch

        num_heads = self._of_model("attention.head_count")
        permuted_heads = {"attn_q": num_heads}
        permuted_heads["attn_k"] = self._of_model("attention.head_count_kv", num_heads)
        for stored in self._reader.tensors:
            name = _hf_name(stored.name)
            values = gguf.dequantize(stored.data, stored.tensor_type)
            # A copy: an fp32 tensor would alias the read-only memory map.
            tensor = torch.tensor(values, dtype=torch.float32)
            kind = stored.name.split(".")[-2]
            if kind in permuted_heads and self.architecture in _PERMUTED_ARCHITECTURES:
                tensor = unpermute_rows(tensor, permuted_heads[kind])
            yield name, tensor

    def tokenizer(self) -> tuple[Tokenizer, dict[str, Any]]:
        """Return the tokenizer and what `tokenizer_config.json` holds beside it.

        It gives the tokens that `AutoTokenizer.from_pretrained(..., gguf_file=...)` gives.

        Raises:
            ConfigError: not a byte-level BPE, or one that splits text by other rules than GPT-2's.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        self._require("model", ("gpt2",))
        self._require("pre", _GPT2_SPLITS)
        self._require("add_eos_token", (False, None))
        tokens: list[str] = self._metadata["tokenizer.ggml.tokens"]
        merges: list[str] = self._metadata["tokenizer.ggml.merges"]
        vocab = {token: index for index, token in enumerate(tokens)}
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        for token, kind in zip(tokens, self._metadata["tokenizer.ggml.token_type"], strict=True):
            if kind == _CONTROL:
                tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif kind == _USER_DEFINED:
                tokenizer.add_tokens([AddedToken(token, normalized=False)])
        if self._metadata.get("tokenizer.ggml.add_bos_token"):
            _prepend(tokenizer, tokens[self._metadata["tokenizer.ggml.bos_token_id"]])
        return tokenizer, self._tokenizer_config(tokens)

    def _tokenizer_config(self, tokens: list[str]) -> dict[str, Any]:
        ids = self._special_token_ids() | {
            "unk_token_id": self._metadata.get("tokenizer.ggml.unknown_token_id")
        }
        special = {name.removesuffix("_id"): tokens[i] for name, i in ids.items() if i is not None}
        return special | {
            # Not TokenizersBackend, its name since transformers 5: version 4 must load it too.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": self._metadata.get("tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": self._of_model("context_length"),
        }

    def _special_token_ids(self) -> dict[str, int | None]:
        return {
            f"{ours}_token_id": self._metadata.get(f"tokenizer.ggml.{theirs}_token_id")
            for ours, theirs in {"bos": "bos", "eos": "eos", "pad": "padding"}.items()
        }

    def _of_model(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ConfigError(f"{self._path}: the key {self.architecture}.{key} is missing")
        return value

    def _require(self, key: str, allowed: tuple[object, ...]) -> None:
        got = self._metadata.get(f"tokenizer.ggml.{key}")
        if got not in allowed:
            raise ConfigError(
                f"{self._path}: tokenizer.ggml.{key} = {got!r} is not supported, only {allowed}"
            )


def unpermute_rows(tensor: Tensor, num_heads: int) -> Tensor:
    """Return the rows of a query or key projection in Hugging Face's order.

    GGUF keeps a Llama's rotary pairs adjacent, (0, 1), (2, 3), ...; Hugging Face keeps the first
    elements of all pairs of a head before the second ones.

    Args:
        tensor: weight `[num_heads * head_dim, hidden_size]` or bias `[num_heads * head_dim]`.
        num_heads: heads of this projection: KV heads for a key, not query heads.
    """
    rest = tensor.shape[1:]
    # [num_heads, head_dim / 2, 2 (pair), hidden_size]
    pairs = tensor.reshape(num_heads, -1, 2, *rest)
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, kind, suffix = match.groups()
        if kind in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"
    kind, _, suffix = name.rpartition(".")
    if kind in _TOP_LEVEL_NAMES and suffix == "weight":
        return f"{_TOP_LEVEL_NAMES[kind]}.weight"
    raise ConfigError(f"GGUF tensor {name!r} belongs to no model that is supported here")


def _prepend(tokenizer: Tokenizer, token: str) -> None:
    """Make `tokenizer` put `token` before every text that it encodes."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token} $B",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )


def _short(value: float) -> float:
    """The number with the fewest digits that is this one in fp32: 1e-05, not 9.99999974e-06."""
    import numpy as np

    return float(str(np.float32(value)))
