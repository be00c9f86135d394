"""Sparse decode of several sequences at once over a cache in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tiny_models import (
    VOCAB_SIZE,
    assert_same_answer,
    open_llm,
    prompt_of,
    sharpen,
    steps_of,
)

from nanovllm import QUEST, SamplingParams
from nanovllm.engine.rows import Rows
from nanovllm.engine.sequence import Sequence, Status

Tiny = Callable[..., Path]

OPTIONS: dict[str, Any] = {
    "enable_offload": True,
    "kvcache_block_size": 128,
    "num_kvcache_blocks": 60,
    "decode_policy": QUEST,
    "decode_token_budget": 256,
    "decode_prefetch": 0.25,
}


@pytest.fixture(autouse=True)
def checked_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", "1")


@pytest.fixture(scope="module")
def sharp(tiny: Tiny) -> Path:
    return tiny(edit=sharpen)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=VOCAB_SIZE
    )


def answers_alone(directory: Path, prompts: list[list[int]], lengths: list[int]) -> list[Any]:
    outputs = []
    for prompt, length in zip(prompts, lengths, strict=True):
        with open_llm(directory, **OPTIONS, max_num_seqs=1) as llm:
            outputs += llm.generate([prompt], greedy(length), use_tqdm=False)
    return outputs


def test_each_answers_as_alone(sharp: Path) -> None:
    """Of many lengths, past the ends of blocks; who ends early leaves its row to the next."""
    prompts = [prompt_of(n, i) for i, n in enumerate((900, 1, 250, 127, 600, 384))]
    lengths = [40, 150, 10, 5, 30, 2]
    with open_llm(sharp, **OPTIONS, max_num_seqs=3) as llm:
        outputs = llm.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
    for output, alone in zip(outputs, answers_alone(sharp, prompts, lengths), strict=True):
        assert_same_answer(output, alone)


@pytest.mark.parametrize("order", ["auto", "layer"])
def test_a_long_prompt_beside_others_that_decode(sharp: Path, order: str) -> None:
    """It takes turns with them, unless it is to be computed layer by layer."""
    prompts = [prompt_of(300, 1), prompt_of(1500, 2)]
    options = OPTIONS | {"max_num_batched_tokens": 256, "prefill_order": order}
    with open_llm(sharp, **options) as llm:
        params = greedy(20)
        first = llm.engine.add_request(prompts[0], params)
        while first.num_tokens < 305:
            llm.engine.step()
        second = llm.engine.add_request(prompts[1], params)
        steps = []
        while second.num_tokens == 1500:
            steps.append(llm.engine.step())
        while llm.engine.has_unfinished():
            llm.engine.step()
        outputs = [first.output(), second.output()]
    assert all(step.decodes for step in steps)
    assert (len(steps) == 1) == (order == "layer")
    for output, alone in zip(outputs, answers_alone(sharp, prompts, [20, 20]), strict=True):
        assert_same_answer(output, alone)


def test_preempted_and_resumed(sharp: Path) -> None:
    """Where host memory is full the newest waits, and its row may go to another."""
    prompts = [prompt_of(n, i) for i, n in enumerate((500, 370, 250, 120))]
    lengths = [150, 150, 150, 20]
    with open_llm(sharp, **OPTIONS | {"num_kvcache_blocks": 12}, max_num_seqs=3) as llm:
        outputs = llm.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
        assert llm.engine.num_preemptions > 0
        llm.engine.check_integrity()
    # A preempted request computes its answer again densely and may go on otherwise, see quest.md.
    assert_same_answer(outputs[0], answers_alone(sharp, prompts[:1], lengths[:1])[0])
    assert [len(output.token_ids) for output in outputs] == lengths


def test_an_aborted_request_leaves_its_row(sharp: Path) -> None:
    prompts = [prompt_of(300, 1), prompt_of(400, 2), prompt_of(200, 3)]
    with open_llm(sharp, **OPTIONS, max_num_seqs=2) as llm:
        params = greedy(30)
        sequences = [llm.engine.add_request(prompt, params) for prompt in prompts]
        for _ in range(6):
            llm.engine.step()
        llm.engine.abort(sequences[0])
        while llm.engine.has_unfinished():
            llm.engine.step()
        outputs = [seq.output() for seq in sequences[1:]]
    for output, alone in zip(outputs, answers_alone(sharp, prompts[1:], [30, 30]), strict=True):
        assert_same_answer(output, alone)


def test_one_step_decodes_all(sharp: Path) -> None:
    prompts = [prompt_of(200, i) for i in range(5)]
    with open_llm(sharp, **OPTIONS, max_num_seqs=4) as llm:
        _, counts = steps_of(llm, prompts, 10, ignore_eos=True)
    assert [num_decodes for _, num_decodes in counts].count(4) == 9


def test_rows() -> None:
    """The lowest that is free; one's own as long as one runs, and after that if nobody took it."""
    rows = Rows(2)
    first, second, third = (
        Sequence(i, [1], SamplingParams(), None, Random(0), 0.0, status=Status.RUNNING)
        for i in range(3)
    )
    assert [rows.row_of(seq) for seq in (first, second, first)] == [0, 1, 0]
    first.status = Status.WAITING
    assert rows.row_of(third) == 0
    second.status = Status.FINISHED
    first.status = Status.RUNNING
    assert rows.row_of(first) == 1
