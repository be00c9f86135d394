"""Small models written the way other programs write them, for the tests of `nanovllm.tools`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MLP, NUM_LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "he", "Ġhe", "ll", "hell", "ĠĠ"]
MERGES = ["h e", "Ġ he", "l l", "he ll", "Ġ Ġ"]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

WriteGguf = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture
def write_gguf() -> WriteGguf:
    return write_tiny_gguf


def write_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "smollm",
    add_bos: bool = False,
    tied: bool = True,
    extra_tensor: str | None = None,
) -> dict[str, torch.Tensor]:
    """Write a random model as llama.cpp's converter would; return its Hugging Face state dict."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)

    rng = np.random.default_rng(0)
    weights: dict[str, torch.Tensor] = {}

    def add(stored: str, name: str, *shape: int, heads: int | None = None) -> None:
        values = rng.standard_normal(shape, dtype=np.float32)
        weights[name] = torch.from_numpy(values.copy())
        if heads is not None and architecture == "llama":
            values = permute_as_llama_cpp(values, heads)
        as_kind = kind if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(values, as_kind), raw_dtype=as_kind)

    queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    add("token_embd.weight", "model.embed_tokens.weight", len(TOKENS), HIDDEN)
    for i in range(NUM_LAYERS):
        blk, layer = f"blk.{i}", f"model.layers.{i}"
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        add(f"{blk}.attn_norm.weight", f"{layer}.input_layernorm.weight", HIDDEN)
        add(f"{blk}.attn_q.weight", f"{attn}.q_proj.weight", queries, HIDDEN, heads=NUM_HEADS)
        add(f"{blk}.attn_k.weight", f"{attn}.k_proj.weight", keys, HIDDEN, heads=NUM_KV_HEADS)
        add(f"{blk}.attn_v.weight", f"{attn}.v_proj.weight", keys, HIDDEN)
        if architecture == "qwen2":
            add(f"{blk}.attn_q.bias", f"{attn}.q_proj.bias", queries)
            add(f"{blk}.attn_k.bias", f"{attn}.k_proj.bias", keys)
            add(f"{blk}.attn_v.bias", f"{attn}.v_proj.bias", keys)
        if architecture == "qwen3":
            add(f"{blk}.attn_q_norm.weight", f"{attn}.q_norm.weight", HEAD_DIM)
            add(f"{blk}.attn_k_norm.weight", f"{attn}.k_norm.weight", HEAD_DIM)
        add(f"{blk}.attn_output.weight", f"{attn}.o_proj.weight", HIDDEN, queries)
        add(f"{blk}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", HIDDEN)
        add(f"{blk}.ffn_gate.weight", f"{mlp}.gate_proj.weight", MLP, HIDDEN)
        add(f"{blk}.ffn_up.weight", f"{mlp}.up_proj.weight", MLP, HIDDEN)
        add(f"{blk}.ffn_down.weight", f"{mlp}.down_proj.weight", HIDDEN, MLP)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    if not tied:
        add("output.weight", "lm_head.weight", len(TOKENS), HIDDEN)
    if extra_tensor:
        add(extra_tensor, extra_tensor, HIDDEN)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def permute_as_llama_cpp(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the two elements of every rotary pair next to each other, head by head."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
