"""Model directories whose answers are known by hand.

The layers of a rigged model add nothing, so the hidden state after the last norm is a one-hot
vector of the newest token, and row `i` of `next_logits` is what the head returns after token `i`.
A fixed distribution repeats one row; a chain has one likely successor in each.
"""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

NEVER = -1e4
"""A logit whose probability is 0 in any precision, and finite as a model's logits are."""
SHARES = (0.4, 0.3, 0.2, 0.1)
BOS, EOS = "<s>", "</s>"
BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_NUM_LAYERS, _HEAD_DIM, _MLP = 2, 16, 16


def write_model(
    directory: Path,
    next_logits: torch.Tensor,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **config: Any,
) -> Path:
    """Write a Llama that returns `next_logits[i]` after token `i`; return the directory.

    Args:
        directory: where to; made if it is missing.
        next_logits: `[vocab_size, vocab_size]`.
        tokenizer: saved beside the model; None writes none.
        config: keys of config.json to add or replace.
    """
    vocab_size = len(next_logits)
    # The norm leaves a one-hot vector times sqrt(hidden) as it is: exactly, if that root is a power
    # of 2.
    hidden = 4 ** math.ceil(math.log(max(vocab_size, 16), 4))
    embedding = torch.zeros(vocab_size, hidden)
    embedding.fill_diagonal_(math.sqrt(hidden))
    head = torch.zeros(vocab_size, hidden)
    head[:, :vocab_size] = next_logits.T / math.sqrt(hidden)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
    }
    generator = torch.Generator().manual_seed(0)
    for i in range(_NUM_LAYERS):
        layer = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{layer}.self_attn.{name}.weight"] = torch.randn(
                _HEAD_DIM, hidden, generator=generator
            )
        weights[f"{layer}.self_attn.o_proj.weight"] = torch.zeros(hidden, _HEAD_DIM)
        for name in ("gate_proj", "up_proj"):
            weights[f"{layer}.mlp.{name}.weight"] = torch.randn(_MLP, hidden, generator=generator)
        weights[f"{layer}.mlp.down_proj.weight"] = torch.zeros(hidden, _MLP)
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "dtype": "float32",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": _MLP,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _HEAD_DIM,
        "rms_norm_eps": 1e-12,
        "eos_token_id": None if tokenizer is None else tokenizer.eos_token_id,
    } | config
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(weights, directory / "model.safetensors")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return directory


def fixed_distribution(shares: Sequence[float], vocab_size: int) -> torch.Tensor:
    """Return `next_logits` that give tokens 0, 1, ... these shares whatever came before."""
    row = torch.full((vocab_size,), NEVER)
    row[: len(shares)] = torch.tensor(shares, dtype=torch.float64).log().float()
    return row.expand(vocab_size, vocab_size)


def chain(vocab_size: int, *paths: Sequence[int], rest: int = 0) -> torch.Tensor:
    """Return `next_logits` under which each token of a path is followed by the path's next.

    Every other token, and the last of a path, is followed by `rest`.

    Raises:
        ValueError: a token would have two successors.
    """
    successor: dict[int, int] = {}
    for path in paths:
        for token, following in pairwise(path):
            if successor.setdefault(token, following) != following:
                raise ValueError(f"token {token} has two successors in {paths}")
    logits = torch.full((vocab_size, vocab_size), NEVER)
    for token in range(vocab_size):
        logits[token, successor.get(token, rest)] = 0.0
    return logits


def byte_level_tokenizer(
    *extra: str, adds_bos: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer that writes one token a byte, as GPT-2's with no merge learnt.

    Ids: 0 is `</s>`, 1 is `<s>`, then the 256 bytes, then `extra` tokens, which only a model emits.
    """
    tokens = [EOS, BOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *extra]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 1)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    fast.chat_template = chat_template
    return fast


def sentencepiece_tokenizer(*extra: str, metaspace: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer as converted from SentencePiece: `▁` for a space, bytes as a fallback.

    Ids: 0 is `</s>`, 1 is `<s>`, 2 is `<unk>`, then `<0x00>` to `<0xFF>`, then `extra`.

    Args:
        extra: further tokens, `▁` where a word begins.
        metaspace: decode with the Metaspace decoder instead of Llama 2's sequence.
    """
    tokens = [EOS, BOS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *extra]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token="<unk>"
    )


def ids(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    """Return the ids of tokens, written as in the vocabulary; each must be there."""
    vocab: Mapping[str, int] = tokenizer.get_vocab()
    return [vocab[token] for token in tokens]


NUM_NEEDLES, NUM_HAY = 8, 16
_SCORE = 40.0  # e**40 is far more than the tokens of any text


def write_retrieval_model(
    directory: Path, max_position_embeddings: int, num_heads: int = 2
) -> Path:
    """Write a Llama that looks up needles wherever they lie; return the directory.

    A `needle_token(i, j)` in the text says that question `i` is answered by question `j`: after
    `question_token(i)` the model generates `question_token(j)`, and so goes on from needle to
    needle. Tokens 0 to `NUM_HAY - 1` mean nothing. Of the layer's query heads, which share a KV
    head, head `i % num_heads` looks for the needles of question `i`. Positions turn the dimensions
    that they look at by less than 0.05 of a radian in 33,000 tokens.
    """
    vocab_size = question_token(NUM_NEEDLES)
    hidden, head_dim, mlp = 64, 32, 16
    root = math.sqrt(hidden)
    # Parts of the hidden state: needle's question, needle's answer, question asked, answer found,
    # and one for each token that means nothing.
    needle, says, asked, found, hay = range(0, 40, 8)
    embedding = torch.zeros(vocab_size, hidden)
    for token in range(NUM_HAY):
        embedding[token, hay + token] = root
    q_proj, k_proj = torch.zeros(num_heads * head_dim, hidden), torch.zeros(head_dim, hidden)
    v_proj, o_proj = torch.zeros(head_dim, hidden), torch.zeros(hidden, num_heads * head_dim)
    head = torch.zeros(vocab_size, hidden)
    size = math.sqrt(_SCORE * math.sqrt(head_dim)) / root
    for i in range(NUM_NEEDLES):
        for j in range(NUM_NEEDLES):
            # Two parts of equal size, which the norm keeps as they are.
            embedding[needle_token(i, j), [needle + i, says + j]] = root / math.sqrt(2)
        embedding[question_token(i), asked + i] = root
        # The last pairs of dimensions are those that positions hardly turn.
        slow = head_dim // 2 - NUM_NEEDLES + i
        q_proj[i % num_heads * head_dim + slow, asked + i] = size * math.sqrt(2)
        k_proj[slow, needle + i] = size
        v_proj[i, says + i] = 1.0
        for query_head in range(num_heads):
            o_proj[found + i, query_head * head_dim + i] = 1.0
        head[question_token(i), found + i] = 1.0
    layer = "model.layers.0"
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
        f"{layer}.input_layernorm.weight": torch.ones(hidden),
        f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}.self_attn.q_proj.weight": q_proj,
        f"{layer}.self_attn.k_proj.weight": k_proj,
        f"{layer}.self_attn.v_proj.weight": v_proj,
        f"{layer}.self_attn.o_proj.weight": o_proj,
        f"{layer}.mlp.gate_proj.weight": torch.zeros(mlp, hidden),
        f"{layer}.mlp.up_proj.weight": torch.zeros(mlp, hidden),
        f"{layer}.mlp.down_proj.weight": torch.zeros(hidden, mlp),
    }
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "dtype": "float32",
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-12,
        "rope_theta": 1e12,
        "eos_token_id": None,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(weights, directory / "model.safetensors")
    return directory


def needle_token(question: int, answer: int) -> int:
    """Return the token of the retrieval model that says which question answers a question."""
    return NUM_HAY + NUM_NEEDLES * question + answer


def question_token(question: int) -> int:
    """Return the token of the retrieval model that asks, or answers with, a question."""
    return NUM_HAY + NUM_NEEDLES**2 + question
