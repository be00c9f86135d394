"""Trials from other people's bug reports, for a KV cache in host memory.

The offload half of CASES C35, C44, C49, C50 and C52.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chat_turns import TURNS, assert_two_turns_are_served, take_last_tokens_for_fed
from rigged_models import (
    NUM_HAY,
    NUM_NEEDLES,
    needle_token,
    question_token,
    write_retrieval_model,
)
from tiny_models import (
    VOCAB_SIZE,
    assert_marked,
    assert_same_answer,
    assert_same_logprobs,
    assert_served,
    generate,
    open_llm,
    prompt_of,
    steps_of,
)

from nanovllm import CapacityError
from nanovllm.device.hazards import HazardError

Tiny = Callable[..., Path]

RESIDENT = {"kvcache_block_size": 128}
OFFLOADED = {"enable_offload": True, "kvcache_block_size": 128}
MODES: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "layer_major": OFFLOADED | {"prefill_order": "layer", "num_gpu_blocks": 8},
    "chunk_major": OFFLOADED | {"prefill_order": "chunk", "num_gpu_blocks": 8},
    "two_slots": OFFLOADED | {"prefill_order": "chunk", "num_gpu_blocks": 2},
}
offloaded_modes = pytest.mark.parametrize("mode", [name for name in MODES if name != "resident"])


@pytest.fixture(autouse=True)
def checked_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", "1")


# C35: a request larger than the pool.


@offloaded_modes
def test_a_request_larger_than_the_pool(tiny: Tiny, mode: str) -> None:
    directory = tiny()
    prompts = [prompt_of(n) for n in (900, 40, 500)]
    options = MODES[mode] | {"num_kvcache_blocks": 4, "max_num_batched_tokens": 100}
    with open_llm(directory, **options) as llm:
        outputs, counts = steps_of(llm, prompts[1:], 60)
        marked, beside = generate(llm, prompts[:2], 60)
        assert llm.engine.num_preemptions == 0
    assert_marked(marked, "900 tokens", "4 blocks of 128 tokens")
    assert_served(outputs[0], directory, prompts[1], 60)
    assert_served(beside, directory, prompts[1], 60)
    # The pool ends the third one: 512 tokens fit.
    assert_served(outputs[1], directory, prompts[2], 12)
    assert len(counts) < 150


@offloaded_modes
def test_a_mebibyte_of_host_memory(tiny: Tiny, mode: str) -> None:
    directory = tiny()
    prompts = [prompt_of(n) for n in (1100, 40, 900)]
    # A token takes 1 KiB, so 1,024 fit.
    options = MODES[mode] | {"num_kvcache_blocks": None, "cpu_memory_gb": 1 / 1024}
    with open_llm(directory, max_num_batched_tokens=300, **options) as llm:
        marked, small, large = generate(llm, prompts, 60)
        assert llm.stats()["kv_host_bytes"] == 1 << 20
    assert_marked(marked, "1100 tokens", "1024", "raise cpu_memory_gb")
    assert_served(small, directory, prompts[1], 60)
    assert_served(large, directory, prompts[2], 60)


# C44: an answer that ends on a block end, and the next turn of the chat.


@pytest.mark.parametrize("mode", ["layer_major", "two_slots"])
@pytest.mark.parametrize(("num_prompt", "num_answer"), TURNS)
def test_the_next_turn_of_a_chat(tiny: Tiny, mode: str, num_prompt: int, num_answer: int) -> None:
    options = {"max_num_batched_tokens": 100} | MODES[mode]
    assert_two_turns_are_served(tiny(), num_prompt, num_answer, **options)


def test_a_block_with_an_unwritten_slot_is_found(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the trial above: an ended request's last token is taken for fed."""
    take_last_tokens_for_fed(monkeypatch)
    with pytest.raises(HazardError, match="holds nothing"):
        test_the_next_turn_of_a_chat(tiny, "layer_major", 100, 28)


# C49: restored prefixes of more than 128 blocks.

NUM_TOKENS = 33_000
NEEDLE_BLOCKS = (0, 1, 63, 127, 128, 129, 255, 256)
# Which question answers which: one round through all eight, so that each is asked in decode too.
ANSWER_OF = (3, 5, 7, 6, 1, 2, 4, 0)
RETRIEVAL_MODES: dict[str, dict[str, Any]] = {
    "resident": RESIDENT,
    "three_slots": OFFLOADED | {"prefill_order": "chunk", "num_gpu_blocks": 3},
    "layer_major": OFFLOADED | {"prefill_order": "layer"},
}


@pytest.fixture(scope="module")
def retrieval_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_retrieval_model(tmp_path_factory.mktemp("retrieval"), NUM_TOKENS + 100)


def text_with_needles() -> list[int]:
    random = Random(0)
    text = [random.randrange(NUM_HAY) for _ in range(NUM_TOKENS)]
    for question, block in enumerate(NEEDLE_BLOCKS):
        # The first and the last token of a block among others.
        place = (0, 1, 64, 127)[question % 4]
        text[128 * block + place] = needle_token(question, ANSWER_OF[question])
    return text


def answers_by_hand(question: int) -> list[int]:
    tokens = []
    for _ in range(NUM_NEEDLES):
        question = ANSWER_OF[question]
        tokens.append(question_token(question))
    return tokens


@pytest.mark.parametrize("mode", RETRIEVAL_MODES)
def test_needles_in_a_restored_prefix(retrieval_model: Path, mode: str) -> None:
    text = text_with_needles()
    options = RETRIEVAL_MODES[mode] | {"num_kvcache_blocks": 260, "max_num_batched_tokens": 8192}
    with open_llm(retrieval_model, **options) as llm:
        for question in range(NUM_NEEDLES):
            (output,) = generate(llm, [[*text, question_token(question)]], NUM_NEEDLES)
            assert output.token_ids == answers_by_hand(question)
            assert output.num_cached_tokens == (NUM_TOKENS // 128 * 128 if question else 0)


def test_a_block_restored_wrongly_shows(retrieval_model: Path) -> None:
    """Control: the answers come from host memory, and each needle counts."""
    text, question = text_with_needles(), 4
    options = RETRIEVAL_MODES["layer_major"] | {"num_kvcache_blocks": 260}
    with open_llm(retrieval_model, max_num_batched_tokens=8192, **options) as llm:
        generate(llm, [[*text, question_token(0)]], 1)
        llm.engine.device.synchronize()
        pool = llm.engine._runner._engine.pool
        pool.blocks(0, NEEDLE_BLOCKS[question]).copy_(pool.blocks(0, 130))
        (output,) = generate(llm, [[*text, question_token(question)]], NUM_NEEDLES)
    assert output.num_cached_tokens == NUM_TOKENS // 128 * 128
    assert output.token_ids != answers_by_hand(question)


# C50: two long requests, and budgets that are too small.


@offloaded_modes
def test_two_prompts_and_room_for_one_and_a_half(tiny: Tiny, mode: str) -> None:
    directory, prompts = tiny(), [prompt_of(2000, seed) for seed in (0, 1)]
    budget = 3000 * 1024 / 2**30  # a token takes 1 KiB
    options = MODES[mode] | {"num_kvcache_blocks": None, "cpu_memory_gb": budget}
    with open_llm(directory, max_num_batched_tokens=600, **options) as llm:
        assert llm.engine.num_free_blocks == 23
        outputs, counts = steps_of(llm, prompts, 30)
        assert llm.engine.num_preemptions == 0
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_served(output, directory, prompt, 30)
    # In turn: the second one's prefill comes after the first one's last decode.
    decoding = [decodes for _, decodes in counts]
    assert decoding == 2 * ([0] * (len(counts) // 2 - 29) + [1] * 29)


@pytest.mark.parametrize("gib", [0, 0.0, 1e-4])
def test_no_host_memory(tiny: Tiny, gib: float) -> None:
    options = OFFLOADED | {"num_kvcache_blocks": None, "cpu_memory_gb": gib}
    with pytest.raises(CapacityError, match=r"128 tokens needs 0\.000122 GiB, and .* gives"):
        open_llm(tiny(), **options)


def test_a_budget_below_one_prompt(tiny: Tiny) -> None:
    directory, prompts = tiny(), [prompt_of(2000), prompt_of(1000)]
    options = OFFLOADED | {"num_kvcache_blocks": None, "cpu_memory_gb": 1500 / 2**20}
    with pytest.raises(CapacityError, match=r"2048 needs 0\.00195 GiB .* 0\.00134 GiB"):
        open_llm(directory, max_model_len=2048, **options)
    with open_llm(directory, **options) as llm:
        marked, served = generate(llm, prompts, 8)
    assert_marked(marked, "2000 tokens", "1408", "11 blocks", "0.00134 GiB")
    assert_served(served, directory, prompts[1], 8)


# C52, its dense part: lengths that are no multiple of anything, in one call.

ODD_LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 511, 1000, 1025)
# Query heads, KV heads, head_dim, hidden_size.
HEADS = {
    "4/2": (4, 2, 32, 64),
    "9/3": (9, 3, 64, 72),
    "4/4 of 80": (4, 4, 80, 64),
    "8/1 of 96": (8, 1, 96, 64),
}


@pytest.mark.parametrize("shape", HEADS)
def test_odd_lengths_in_four_modes(tiny: Tiny, shape: str) -> None:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    directory = tiny(**dict(zip(names, HEADS[shape], strict=True)))
    prompts = [prompt_of(n) for n in ODD_LENGTHS]
    options = {"num_kvcache_blocks": 40, "max_num_batched_tokens": 300}
    results = []
    for mode in MODES.values():
        with open_llm(directory, **mode | options) as llm:
            results.append(generate(llm, prompts, 6, logprobs=VOCAB_SIZE))
    for output, prompt in zip(results[0], prompts, strict=True):
        assert_served(output, directory, prompt, 6)
        assert_same_logprobs(output.logprobs, output.token_ids, directory, prompt)
    for outputs in results[1:]:
        for ours, theirs in zip(outputs, results[0], strict=True):
            assert_same_answer(ours, theirs)
