"""Sparse decode on the card: the same answers wherever the cache lies, no wait, bounded memory."""

from functools import cache

import pytest
import torch
from no_waits import forbid_waits
from test_gpu_offload import generate, open_llm, open_offloaded, prompts

from nanovllm import QUEST, SamplingParams
from nanovllm.kvcache.sparse.quest import QuestPolicy

pytestmark = pytest.mark.gpu

NUM_TOKENS = 150  # the longest prompt makes a block of 1,024 tokens full
OFFLOADED = {
    "layer-major": {"prefill_order": "layer"},
    "chunk-major": {"prefill_order": "chunk"},
    "eager": {"enforce_eager": True},
    "small blocks": {"kvcache_block_size": 128},
    "nothing kept": {"decode_hot_cache_gb": 0},
    "fetched ahead": {"decode_prefetch": 0.25},
}
# Whose prefill is the resident one, bit for bit.
SAME_PREFILL = ("layer-major", "nothing kept", "fetched ahead")


def sparse(budget=512, **options):
    return {"decode_policy": QUEST, "decode_token_budget": budget, "enforce_eager": False} | options


def generate_alone(llm):
    """Answer one prompt after the other: products round by the number of rows."""
    return [generate(llm, [prompt], NUM_TOKENS)[0] for prompt in prompts()]


@cache
def resident(budget, dtype="bfloat16"):
    with open_llm(dtype, num_kvcache_blocks=64, **sparse(budget)) as llm:
        return generate_alone(llm)


def assert_equal(outputs, expected):
    for output, other in zip(outputs, expected, strict=True):
        assert output.token_ids == other.token_ids
        assert output.logprobs == other.logprobs


def test_room_for_everything_is_dense():
    """To the last bit: the same kernel reads the same tokens in the same order."""
    with open_llm("bfloat16", num_kvcache_blocks=64, enforce_eager=False) as llm:
        dense = generate_alone(llm)
    assert_equal(resident(6144), dense)
    assert any(a.token_ids != b.token_ids for a, b in zip(resident(512), dense, strict=True))


@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("mode", OFFLOADED)
def test_the_same_answers_from_host_memory(mode, checked, monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", str(int(checked)))
    with open_offloaded("bfloat16", **sparse() | OFFLOADED[mode]) as llm:
        outputs = generate_alone(llm)
        pages = llm.stats()["pages"]
    if mode in SAME_PREFILL:
        assert_equal(outputs, resident(512))
    for output, other in zip(outputs, resident(512), strict=True):
        assert output.token_ids[0] == other.token_ids[0]
    assert (pages["hit_rate"] > 0.5) == (mode != "nothing kept")


@pytest.mark.parametrize("in_host_memory", [False, True])
def test_many_at_once(in_host_memory):
    """Beside each other in one graph, each as alone but for the rounding of products.

    In fp32, where that is small: in bfloat16 the next best token may be one step of a logit away.
    """
    open_one = open_offloaded if in_host_memory else open_llm
    sizes = {} if in_host_memory else {"num_kvcache_blocks": 64}
    with open_one("float32", **sizes, **sparse()) as llm:
        outputs = generate(llm, [prompts()[2]] * 3, 40)
    alone = resident(512, "float32")[2]
    for output in outputs:
        assert output.token_ids[0] == alone.token_ids[0]
        row = alone.logprobs[1]
        assert row[output.token_ids[1]] > max(row.values()) - 0.01


def test_the_host_does_not_wait_for_pages():
    with open_offloaded("bfloat16", **sparse()) as llm:
        generate_alone(llm)
        calls = forbid_waits(llm)
        generate(llm, [prompts()[2]], 40)
    assert len(calls) >= 40


def test_memory_does_not_grow():
    with open_offloaded("bfloat16", **sparse()) as llm:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        llm.generate([prompts()[2]], params, use_tqdm=False)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            llm.generate([prompts()[2]], params, use_tqdm=False)
            torch.cuda.synchronize()
            assert torch.cuda.memory_allocated() <= before


def test_a_policy_object_and_larger_pages():
    for page_size in (64, 128):
        policy = {"decode_policy": QuestPolicy(6144, page_size)}
        with open_offloaded("bfloat16", **policy) as llm:
            outputs = generate_alone(llm)
        for output, other in zip(outputs, resident(6144), strict=True):
            assert output.token_ids[0] == other.token_ids[0]
