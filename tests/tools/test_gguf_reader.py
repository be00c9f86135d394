"""GGUF files against the state dict that they were written from, and against transformers."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

from nanovllm.errors import ConfigError
from nanovllm.tools.gguf_reader import GgufModel, unpermute_rows

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(path, write_gguf, architecture, tied):
    written = write_gguf(path, architecture=architecture, tied=tied)
    model = GgufModel(path)
    read = dict(model.tensors())
    assert model.num_tensors == len(written)
    assert read.keys() == written.keys()
    assert ("lm_head.weight" in read) is not tied
    for name, expected in written.items():
        assert read[name].dtype == torch.float32
        assert torch.equal(read[name], expected), name


def test_quantised_round_trip(path, write_gguf):
    written = write_gguf(path, kind=gguf.GGMLQuantizationType.Q8_0)
    for name, tensor in GgufModel(path).tensors():
        # Half a step, a step being the largest of 32 neighbours over 127, and 0.06 of one for the
        # step's own rounding to fp16.
        step = written[name].abs().max().item() / 127
        torch.testing.assert_close(tensor, written[name], rtol=0, atol=0.57 * step)


@pytest.mark.parametrize(("name", "right", "wrong"), [(Q_PROJ, 4, 2), (K_PROJ, 2, 4)])
def test_wrong_head_count_scrambles_rows(path, write_gguf, name, right, wrong):
    written = write_gguf(path)
    stored = "blk.1.attn_q.weight" if name == Q_PROJ else "blk.1.attn_k.weight"
    rows = next(t.data for t in gguf.GGUFReader(path).tensors if t.name == stored)
    tensor = torch.tensor(rows)
    assert not torch.equal(tensor, written[name])
    assert torch.equal(unpermute_rows(tensor, right), written[name])
    assert not torch.equal(unpermute_rows(tensor, wrong), written[name])


def test_unpermute_bias():
    # Two heads of four: pairs (0, 1), (2, 3) of each become halves.
    bias = torch.arange(8.0)
    assert unpermute_rows(bias, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_config(path, write_gguf):
    write_gguf(path)
    config = GgufModel(path).config()
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert config | expected == config


def test_equals_transformers(path, write_gguf):
    write_gguf(path, kind=gguf.GGMLQuantizationType.Q4_1)
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).state_dict()
    for name, tensor in GgufModel(path).tensors():
        assert torch.equal(tensor, reference[name]), name


@pytest.mark.parametrize("add_bos", [False, True])
def test_tokenizer_equals_transformers(path, write_gguf, add_bos):
    write_gguf(path, add_bos=add_bos)
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend, config = GgufModel(path).tokenizer()
    ours = PreTrainedTokenizerFast(tokenizer_object=backend, **config)
    for text in ["hello  he 12\n\n  3 é", "<|im_start|>hell<|im_end|>", "", " \t漢🙂"]:
        ids = ours(text)["input_ids"]
        assert ids == reference(text)["input_ids"]
        assert (ids[:1] == [1]) == (add_bos or text.startswith("<|im_start|>"))
        assert ours.decode(ids) == reference.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == reference.decode(
            ids, skip_special_tokens=True
        )
    assert ours.special_tokens_map == reference.special_tokens_map
    assert ours.eos_token == "<|im_end|>"
    assert ours.chat_template == reference.chat_template


def test_refusals_name_the_cause(path, write_gguf):
    path.write_bytes(b"not a GGUF file")
    with pytest.raises(ConfigError, match=r"tiny\.gguf"):
        GgufModel(path)
    with pytest.raises(ConfigError, match="absent"):
        GgufModel(path.with_name("absent"))
    write_gguf(path, architecture="gemma")
    with pytest.raises(ConfigError, match="gemma"):
        GgufModel(path)
    write_gguf(path, pre="llama-bpe")
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre = 'llama-bpe'"):
        GgufModel(path).tokenizer()


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "odd"])
def test_unknown_tensor_is_refused(path, write_gguf, name):
    write_gguf(path, extra_tensor=name)
    with pytest.raises(ConfigError, match=name):
        dict(GgufModel(path).tensors())
