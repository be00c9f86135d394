"""Sparse prefill on the card: the same tiles wherever the cache lies, no wait, bounded memory."""

from functools import cache

import pytest
import torch
from test_gpu_offload import (
    assert_nearly_same_choice,
    assert_steps_do_not_wait,
    generate,
    open_llm,
    open_offloaded,
    prompts,
)
from tile_recorder import Recorder

from nanovllm import XATTN_BSA
from nanovllm.kvcache.sparse.xattn_bsa import XAttentionBSAPolicy

pytestmark = pytest.mark.gpu

CHOICES = {
    "group": {"threshold": 0.9, "stride": 8, "estimator": "group"},
    "row": {"threshold": 0.7, "stride": 16, "estimator": "row", "guard": 0.5},
}
OFFLOADED = {
    "layer-major": {"prefill_order": "layer"},
    "chunk-major": {"prefill_order": "chunk"},
    "chunk-major, 2 slots": {"prefill_order": "chunk", "num_gpu_blocks": 2},
    "chunk-major, small blocks": {"prefill_order": "chunk", "kvcache_block_size": 128},
}
every_choice = pytest.mark.parametrize("choice", CHOICES)


def generate_alone(llm):
    """Answer one prompt after the other.

    A product with weights rounds by its number of rows, and the last layer and the head have one
    for each prompt that ends in a step: two in a packed prefill, one wherever the cache is in host
    memory.
    """
    return [generate(llm, [prompt], 16)[0] for prompt in prompts()]


@cache
def resident(choice):
    policy = Recorder(**CHOICES[choice])
    with open_llm("bfloat16", num_kvcache_blocks=64, sparse_policy=policy) as llm:
        policy.forget()
        outputs = generate_alone(llm)
        density = llm.stats()["attention"]["tile_density"]
    assert 0.1 < density < 0.9
    return outputs, policy.rows


@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("mode", OFFLOADED)
@every_choice
def test_the_same_tiles_and_answers(choice, mode, checked, monkeypatch):
    """Bit for bit: the same kernels see the same keys, values and tiles."""
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", str(int(checked)))
    policy = Recorder(**CHOICES[choice])
    with open_offloaded("bfloat16", sparse_policy=policy, **OFFLOADED[mode]) as llm:
        policy.forget()
        outputs = generate_alone(llm)
    expected, rows = resident(choice)
    assert rows.keys() == policy.rows.keys()
    assert not [key for key, tiles in rows.items() if not torch.equal(tiles, policy.rows[key])]
    for output, other in zip(outputs, expected, strict=True):
        assert output.logprobs[0] == other.logprobs[0]


def test_backends_agree():
    """flex against what `auto` takes, fa4 on Hopper: the same tiles, nearly the same choice."""
    options = {"attention_backend": "flex", "num_kvcache_blocks": 64}
    policy = Recorder(**CHOICES["group"])
    with open_llm("bfloat16", sparse_policy=policy, **options) as llm:
        policy.forget()
        outputs = generate_alone(llm)
    expected, rows = resident("group")
    # The first layer sees the same keys; later ones those that the other kernel rounded otherwise.
    assert all(torch.equal(policy.rows[key], rows[key]) for key in rows if key[1] == 0)
    for output, other in zip(outputs, expected, strict=True):
        assert_nearly_same_choice(output, other, "bfloat16")


@every_choice
@pytest.mark.parametrize("where", ["resident", "layer-major"])
def test_the_host_does_not_wait(choice, where):
    """From a layer's estimate to its attention, nor anywhere else in a step."""
    policy = XAttentionBSAPolicy(**CHOICES[choice])
    if where == "resident":
        llm = open_llm("bfloat16", num_kvcache_blocks=64, sparse_policy=policy)
    else:
        llm = open_offloaded("bfloat16", prefill_order="layer", sparse_policy=policy)
    with llm:
        assert_steps_do_not_wait(llm, 4)


@pytest.mark.parametrize("order", ["layer", "chunk"])
def test_memory_does_not_grow_over_100_chunks(order):
    prompt = torch.randint(
        49152, (100 * 256 - 55,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    options = {"max_num_batched_tokens": 256, "max_model_len": 26000, "sparse_min_len": 0}
    with open_offloaded("bfloat16", prefill_order=order, sparse_policy=XATTN_BSA, **options) as llm:
        generate(llm, [prompt], 2)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        generate(llm, [prompt], 2)
        peak = torch.cuda.max_memory_allocated()
        generate(llm, [prompt], 2)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before
        assert torch.cuda.max_memory_allocated() <= peak
