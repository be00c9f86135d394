"""Batching, chunks, prefix hits and preemption never show in the answers.

CASES C34, C35, C37, C38, C40, C41, C43, C44 and C46.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chat_turns import TURNS, assert_two_turns_are_served, take_last_tokens_for_fed
from tiny_models import (
    assert_marked,
    assert_same_greedy,
    assert_served,
    generate,
    open_llm,
    prompt_of,
    steps_of,
)

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine import block_manager
from nanovllm.engine.sequence import Sequence

Tiny = Callable[..., Path]


# Prompts that cannot be served (C34, C35).

MAX_MODEL_LEN = 200
BAD_PROMPTS = {
    "no_ids": ([], "empty"),
    "no_text": ("", "empty"),
    "max_model_len": (prompt_of(MAX_MODEL_LEN), "200 tokens"),
    "three_times_that": (prompt_of(3 * MAX_MODEL_LEN), "600 tokens"),
}


@pytest.mark.parametrize("bad", [[name] for name in BAD_PROMPTS] + [list(BAD_PROMPTS)])
def test_bad_prompts_among_good_ones(tiny: Tiny, bad: list[str]) -> None:
    directory = tiny()
    good = {f"good_{n}": prompt_of(n) for n in (20, 70, 150)}
    order = ["good_20", *bad[:2], "good_70", *bad[2:], "good_150"]
    with open_llm(directory, max_model_len=MAX_MODEL_LEN) as llm:
        outputs = generate(llm, [good.get(n) or BAD_PROMPTS[n][0] for n in order], 10)
        last = prompt_of(MAX_MODEL_LEN - 1)
        (full,) = generate(llm, [last], 10)
    assert len(outputs) == len(order)
    for name, output in zip(order, outputs, strict=True):
        if name in good:
            assert_served(output, directory, good[name], 10)
        else:
            assert_marked(output, BAD_PROMPTS[name][1])
    assert_served(full, directory, last, 1)


def test_a_request_larger_than_the_pool(tiny: Tiny) -> None:  # C35
    directory = tiny()
    prompts = [prompt_of(n) for n in (900, 40, 500)]
    with open_llm(directory, kvcache_block_size=128, num_kvcache_blocks=4) as llm:
        outputs, counts = steps_of(llm, prompts[1:], 60)
        marked, beside = generate(llm, prompts[:2], 60)
    assert_marked(marked, "900 tokens", "4 blocks of 128 tokens")
    assert_served(outputs[0], directory, prompts[1], 60)
    assert_served(beside, directory, prompts[1], 60)
    # The pool ends the third one: 512 tokens fit.
    assert_served(outputs[1], directory, prompts[2], 12)
    assert len(counts) < 150


# Order of the results (C37).


def test_results_come_in_the_order_of_the_prompts(tiny: Tiny) -> None:
    directory = tiny(num_hidden_layers=1)
    prompts = [prompt_of(1 + i % 3, seed=i) for i in range(500)]
    wanted = [1 + i % 9 for i in range(500)]
    # A second call must return nothing of the first, and equal prompts are requests of their own.
    calls = [
        (prompts, wanted),
        (prompts[:3], wanted[:3]),
        (prompts[100:140], wanted[100:140]),
        (prompts[7:8], [9]),
        ([prompts[8]] * 20, wanted[:20]),
    ]
    with open_llm(directory, max_num_seqs=7, kvcache_block_size=16) as llm:
        for some, each in calls:
            outputs = generate(llm, some, each)
            for output, prompt, num_tokens in zip(outputs, some, each, strict=True):
                assert_served(output, directory, prompt, num_tokens)


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_no_more_run_at_once_than_allowed(tiny: Tiny, max_num_seqs: int) -> None:
    directory = tiny()
    prompts = [prompt_of(n) for n in (5, 40, 7, 30)]
    with open_llm(directory, max_num_seqs=max_num_seqs) as llm:
        outputs, counts = steps_of(llm, prompts, 12)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_served(output, directory, prompt, 12)
    assert max(decodes for _, decodes in counts) == max_num_seqs


# Preemption (C38).

PREEMPTED = [prompt_of(n) for n in (90, 110, 130, 170, 200)]


def run_preempted(llm: LLM, **params: float) -> list[RequestOutput]:
    before = llm.engine.num_preemptions
    outputs = generate(llm, PREEMPTED, 180, **params)
    assert llm.engine.num_preemptions > before
    assert [len(output.token_ids) for output in outputs] == [180] * 5
    return outputs


def test_preempted_requests_lose_nothing(tiny: Tiny) -> None:
    directory = tiny()
    sampled = {"temperature": 0.8, "repetition_penalty": 1.3, "seed": 5}
    with open_llm(directory, kvcache_block_size=128, num_kvcache_blocks=6) as llm:
        for output, prompt in zip(run_preempted(llm), PREEMPTED, strict=True):
            assert_same_greedy(output.token_ids, directory, prompt)
            # What a preempted request finds of its own is no hit.
            assert output.num_cached_tokens == 0
        outputs = run_preempted(llm, **sampled)
    with open_llm(directory, max_num_seqs=1, enable_prefix_caching=False) as llm:
        single = generate(llm, PREEMPTED, 180, **sampled)
        assert llm.engine.num_preemptions == 0
        unpenalised = generate(llm, PREEMPTED[:1], 180, **sampled | {"repetition_penalty": 1.0})
    assert [o.token_ids for o in outputs] == [o.token_ids for o in single]
    assert unpenalised[0].token_ids != single[0].token_ids  # control: the penalty has an effect


# Chunked prefill (C40; tests/models/test_parity.py compares every architecture).


@pytest.mark.parametrize("budget", [1, 2, 15, 16, 17, 64])
def test_last_chunks_of_one_token(tiny: Tiny, budget: int) -> None:
    directory = tiny()
    prompts = [prompt_of(multiple * budget + 1) for multiple in (1, 2, 3)]
    with open_llm(
        directory, max_num_batched_tokens=budget, kvcache_block_size=16, num_kvcache_blocks=64
    ) as llm:
        outputs, counts = steps_of(llm, prompts, 20)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_served(output, directory, prompt, 20)
    assert all(0 < prefill + decodes <= budget for prefill, decodes in counts)


# Prefix hits (C41, C43, C44, C46).


@pytest.mark.parametrize("block_size", [16, 128])
def test_chunks_are_no_hits_and_spoil_none(tiny: Tiny, block_size: int) -> None:  # C41
    directory, prompt = tiny(), prompt_of(1000)
    prompts = [prompt, prompt, prompt + prompt_of(300), prompt[:500]]
    with open_llm(
        directory,
        max_num_batched_tokens=256,
        kvcache_block_size=block_size,
        num_kvcache_blocks=4096 // block_size,
    ) as llm:
        outputs = [generate(llm, [prompt], 4)[0] for prompt in prompts]
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_served(output, directory, prompt, 4)
    cold, again, longer, shorter = (output.num_cached_tokens for output in outputs)
    assert cold == 0
    assert 896 <= again <= 999
    assert longer >= 896
    assert 384 <= shorter < 500


def test_without_prefix_caching_nothing_hits(tiny: Tiny) -> None:
    with open_llm(tiny(), kvcache_block_size=16, enable_prefix_caching=False) as llm:
        outputs = generate(llm, [prompt_of(60)], 4) + generate(llm, [prompt_of(60)], 4)
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert outputs[0].token_ids == outputs[1].token_ids


B = 16  # tokens in a block, for C43
X, Y, Z = ([token % 64 for token in prompt_of(B, seed=seed)] for seed in (1, 2, 3))
# Two blocks each that a careless hash takes for the same, and how many leading blocks are.
COLLISIONS = {
    "joined_digits": ([1, 23] * 8 + X, [12, 3] * 8 + X, 0),
    "modulo_256": (X + Y, [token + 256 for token in X] + Y, 0),
    "reversed": (X + Y, X[::-1] + Y, 0),
    "two_swapped": (X + Y, [X[1], X[0], *X[2:], *Y], 0),
    "same_sum": (X + Y, [X[0] + 1, *X[1:-1], X[-1] - 1, *Y], 0),
    "same_xor": ([5, 5, 6, 6] * 4 + Y, [7, 7, 8, 8] * 4 + Y, 0),
    "bytes_shifted": ([0, 256] * 8 + Y, [256, 0] * 8 + Y, 0),
    "zeros": ([0] * 15 + [7] + Y, [7] + [0] * 15 + Y, 0),
    "another_parent": (X + Z, Y + Z, 0),
    "moved": (X + Y, Y + X, 0),
    "last_token": (X + Y, [*X, *Y[:-1], Y[-1] + 1], 1),
    "first_token": (X + Y, [X[0] + 1, *X[1:], *Y], 0),
    "middle_of_second": (X + Y, [*X, *Y[:8], Y[8] + 1, *Y[9:]], 1),
}


@pytest.mark.parametrize("name", COLLISIONS)
def test_blocks_that_look_alike(tiny: Tiny, name: str) -> None:  # C43
    directory = tiny()
    first, second, num_shared = COLLISIONS[name]
    assert first != second
    prompts = [first + Z[:8], second + Z[:8]]
    with open_llm(directory, kvcache_block_size=B) as llm:
        outputs = [generate(llm, [prompt], 8)[0] for prompt in prompts * 2]
    for output, prompt in zip(outputs, prompts * 2, strict=True):
        assert_same_greedy(output.token_ids, directory, prompt)
    assert [o.num_cached_tokens for o in outputs] == [0, num_shared * B, 2 * B, 2 * B]


def test_a_careless_hash_is_found(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the trial above: a block's hash leaves out what is before the block."""
    proper = block_manager.hash_block
    monkeypatch.setattr(block_manager, "hash_block", lambda parent, ids: proper(b"", ids))
    with pytest.raises(AssertionError, match="transformers' is"):
        test_blocks_that_look_alike(tiny, "another_parent")


@pytest.mark.parametrize(("num_prompt", "num_answer"), TURNS)
def test_the_next_turn_of_a_chat(tiny: Tiny, num_prompt: int, num_answer: int) -> None:  # C44
    assert_two_turns_are_served(tiny(), num_prompt, num_answer, kvcache_block_size=128)


def test_a_block_with_an_unwritten_slot_is_found(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the trial above: an ended request's last token is taken for fed."""
    take_last_tokens_for_fed(monkeypatch)
    with pytest.raises(AssertionError, match="'error', 0"):
        test_the_next_turn_of_a_chat(tiny, 100, 28)


def test_equal_prompts_that_start_together(tiny: Tiny) -> None:  # C46
    directory, num_blocks = tiny(), 64
    prompts = [prompt_of(n) for n in (300, 300, 130, 140, 150, 160, 170, 180)]
    wanted = [200, 5, *[20] * 6]
    with open_llm(directory, kvcache_block_size=16, num_kvcache_blocks=num_blocks) as llm:
        engine = llm.engine

        def add(index: int) -> Sequence:
            params = SamplingParams(temperature=0, max_tokens=wanted[index])
            return engine.add_request(list(prompts[index]), params)

        requests = [add(0), add(1)]
        while requests[1].finish_reason is None:
            engine.step()
        requests += [add(index) for index in range(2, 8)]
        fewest_free = num_blocks
        while engine.has_unfinished():
            engine.step()
            engine.check_integrity()
            fewest_free = min(fewest_free, engine.num_free_blocks)
        assert fewest_free < 8, "the blocks of the short one should have been used again"
        assert engine.num_free_blocks == num_blocks
    for request, prompt, num_tokens in zip(requests, prompts, wanted, strict=True):
        assert_served(request.output(), directory, prompt, num_tokens)
