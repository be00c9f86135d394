"""Sparse decode: the pages that the definition chooses, wherever the KV cache lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from quest_parity import QuestReference
from rigged_models import NUM_HAY, needle_token, question_token, write_retrieval_model
from safetensors.torch import load_file, save_file
from tiny_models import (
    LOGPROB_TOLERANCE,
    VOCAB_SIZE,
    assert_marked,
    assert_same_answer,
    assert_same_greedy,
    generate,
    open_llm,
    prompt_of,
    sharpen,
    whole_distribution,
)

from nanovllm import QUEST, CapacityError, ConfigError
from nanovllm.config import Config
from nanovllm.device import HazardError
from nanovllm.kvcache.host_pool import HostPool
from nanovllm.kvcache.host_writer import HostWriter
from nanovllm.kvcache.hot_pages import HotPages
from nanovllm.kvcache.sparse import quest
from nanovllm.kvcache.sparse.quest import QuestPolicy

Tiny = Callable[..., Path]

OFFLOADED = {"enable_offload": True, "kvcache_block_size": 128}
MODES: dict[str, dict[str, Any]] = {
    "resident": {"kvcache_block_size": 256},
    "resident, chunks": {"kvcache_block_size": 128, "max_num_batched_tokens": 300},
    "layer-major": OFFLOADED | {"prefill_order": "layer", "max_num_batched_tokens": 200},
    "chunk-major": OFFLOADED | {"prefill_order": "chunk", "max_num_batched_tokens": 400},
    "nothing kept": OFFLOADED | {"decode_hot_cache_gb": 0},
    "everything kept": OFFLOADED | {"decode_hot_cache_gb": 0.1},
    "fetched ahead": OFFLOADED | {"decode_hot_cache_gb": 0, "decode_prefetch": 0.3},
    "large blocks": OFFLOADED | {"kvcache_block_size": 384, "num_gpu_blocks": 2},
}
HOST_MODES = [mode for mode in MODES if not mode.startswith("resident")]
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def checked_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", "1")


def budget(num_tokens: int, **options: Any) -> dict[str, Any]:
    return {"decode_policy": QUEST, "decode_token_budget": num_tokens} | options


@pytest.fixture(scope="module")
def sharp(tiny: Tiny) -> Path:
    """A model whose attention is sharp enough to be worth a choice."""
    return tiny(edit=sharpen)


# C56: room for everything is dense attention.


@every_mode
def test_room_for_everything_is_dense(tiny: Tiny, mode: str) -> None:
    index = list(MODES).index(mode)
    page_size = (64, 128)[index % 2]
    num_tokens = 130 if mode in ("resident", "chunk-major") else 20
    prompts = [prompt_of(n) for n in (1, 63, 64, 65, 1000)]
    sizes = {"num_kvcache_blocks": 60, "max_model_len": 1200}
    options = sizes | MODES[mode] | budget(1280, decode_page_size=page_size)
    with open_llm(tiny(), **options) as llm:
        outputs = generate(llm, prompts, num_tokens, logprobs=VOCAB_SIZE)
    with open_llm(tiny(), **sizes, **for_object(mode)) as llm:
        dense = generate(llm, prompts, num_tokens, logprobs=VOCAB_SIZE)
    for ours, theirs in zip(outputs, dense, strict=True):
        assert_same_answer(ours, theirs)


# The pages are those of the definition.


@every_mode
@pytest.mark.parametrize(
    ("length", "page_size", "num_tokens", "estimator"),
    [(760, 64, 256, "codes"), (1010, 128, 384, "bounds"), (635, 16, 128, "codes")],
)
def test_answers_are_those_of_the_definition(
    sharp: Path, mode: str, length: int, page_size: int, num_tokens: int, estimator: str
) -> None:
    """Past the ends of blocks, which go to the host when they are full."""
    options = MODES[mode] | budget(
        num_tokens, decode_page_size=page_size, decode_estimator=estimator
    )
    with open_llm(sharp, num_kvcache_blocks=40, **options) as llm:
        (output,) = generate(llm, [prompt_of(length)], 40, logprobs=VOCAB_SIZE)
    num_pages = num_tokens // page_size
    num_recent = min(256 // page_size, num_pages // 2)
    reference = QuestReference(sharp, page_size, num_pages, num_recent, estimator=estimator)
    expected = reference.logits(prompt_of(length), output.token_ids).log_softmax(-1)
    assert reference.num_dropped > 500
    torch.testing.assert_close(
        whole_distribution([output])[0], expected, atol=LOGPROB_TOLERANCE, rtol=0
    )


def test_a_choice_that_is_off_shows(sharp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the lowest bounds in place of the greatest."""
    score = quest.score_pages
    monkeypatch.setattr(quest, "score_pages", lambda *args: -score(*args))
    with open_llm(sharp, **MODES["resident"], **budget(256)) as llm:
        (output,) = generate(llm, [prompt_of(700)], 20, logprobs=VOCAB_SIZE)
    logits = QuestReference(sharp, 64, 4, 2).logits(prompt_of(700), output.token_ids)
    error = (whole_distribution([output])[0] - logits.log_softmax(-1)).abs().max()
    assert error > 10 * LOGPROB_TOLERANCE


def test_answers_alike_in_every_mode(tiny: Tiny) -> None:
    """Prompts after each other, beside each other and with prefixes in the cache."""
    shape = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
    directory = tiny(edit=sharpen, **shape)
    prompts = [prompt_of(n) for n in (1, 129, 1020)]
    prompts.append([*prompts[2][:800], *prompt_of(90, 1)])
    results = []
    for mode in MODES.values():
        with open_llm(directory, num_kvcache_blocks=40, **mode, **budget(192)) as llm:
            for _ in range(2):
                outputs = generate(llm, prompts, 12, logprobs=VOCAB_SIZE)
                results.append(outputs)
            assert outputs[-1].num_cached_tokens > 0
    for outputs in results[1:]:
        for ours, theirs in zip(outputs, results[0], strict=True):
            assert_same_answer(ours, theirs)


@pytest.mark.parametrize("mode", ["resident", "chunk-major"])
def test_blocks_that_others_had(sharp: Path, mode: str) -> None:
    """Bounds of pages go with the tokens, whoever had the blocks before."""
    prompts = [prompt_of(n, 3) for n in (300, 310, 500)]
    options = MODES[mode] | {"num_kvcache_blocks": 6, "max_num_seqs": 1}
    with open_llm(sharp, **options, **budget(192)) as llm:
        outputs = generate(llm, prompts, 40, logprobs=VOCAB_SIZE)
    for prompt, output in zip(prompts, outputs, strict=True):
        with open_llm(sharp, **MODES["resident"], **budget(192)) as llm:
            assert_same_answer(output, generate(llm, [prompt], 40, logprobs=VOCAB_SIZE)[0])


def test_sparse_prefill_then_sparse_decode(sharp: Path) -> None:
    results = []
    for mode in MODES.values():
        options = {"sparse_policy": "XATTN_BSA", "sparse_min_len": 0, "sparse_threshold": 0.6}
        with open_llm(sharp, **mode, **options, **budget(192)) as llm:
            results.append(generate(llm, [prompt_of(1000)], 30, logprobs=VOCAB_SIZE)[0])
    for output in results[1:]:
        assert_same_answer(output, results[0])


# C56: what was planted is found.

TEXT = 2900
DEPTHS = (0, 1, 63, 64, 127, 128, 250, 383, 512, 777, 1019, 1536, 2044, 2400, 2559, 2560, 2700)


@pytest.fixture(scope="module", params=[1, -1], ids=["positive", "negative"])
def retrieval(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The retrieval model, with keys and queries of either sign."""
    directory = write_retrieval_model(tmp_path_factory.mktemp("needles"), 4000, num_heads=8)
    weights = load_file(directory / "model.safetensors")
    for name in ("q_proj", "k_proj"):
        weights[f"model.layers.0.self_attn.{name}.weight"] *= request.param
    save_file(weights, directory / "model.safetensors")
    return directory


def chained_prompt(depth: int) -> tuple[list[int], list[int]]:
    """Return a text whose question's answer is a question, asked in decode; and both answers.

    The needle that answers the second lies at `depth`.
    """
    random = Random(depth)
    first, second, third = random.sample(range(8), 3)
    text = [random.randrange(NUM_HAY) for _ in range(TEXT)]
    text[2800] = needle_token(first, second)
    text[depth] = needle_token(second, third)
    return [*text, question_token(first)], [question_token(second), question_token(third)]


def num_found(directory: Path, depths: Sequence[int], **options: Any) -> int:
    prompts, answers = zip(*map(chained_prompt, depths), strict=True)
    options = {"num_kvcache_blocks": 60, "max_model_len": 3000} | options
    with open_llm(directory, **options) as llm:
        outputs = generate(llm, prompts, 2)
    pairs = zip(outputs, answers, strict=True)
    return sum(output.token_ids == answer for output, answer in pairs)


@pytest.mark.parametrize("mode", ["resident", "layer-major", "chunk-major"])
def test_a_needle_is_found_at_every_depth(retrieval: Path, mode: str) -> None:
    depths = DEPTHS if mode == "resident" else DEPTHS[::3]
    assert num_found(retrieval, depths, **MODES[mode], **budget(512)) == len(depths)


def test_blind_choices_find_few(retrieval: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: pages by anything else."""
    score = quest.score_pages
    monkeypatch.setattr(quest, "score_pages", lambda *args: score(*args) * 0)
    assert num_found(retrieval, DEPTHS, **MODES["resident"], **budget(512)) < len(DEPTHS) / 2


# The hot cache.


def test_pages_are_fetched_once_while_they_stay(sharp: Path) -> None:
    """Counted by hand: what a step wants, but for the unfinished block's pages."""
    wanted, fetched = {}, {}
    for mode in ("nothing kept", "everything kept"):
        with open_llm(sharp, **MODES[mode], **budget(256)) as llm:
            generate(llm, [prompt_of(1000)], 21)
            pages = llm.stats()["pages"]
            wanted[mode], fetched[mode] = pages["pages_wanted"], pages["pages_fetched"]
            assert pages["bytes_fetched"] == 2 * 64 * 32 * 4 * pages["pages_fetched"]
            assert pages["hit_rate"] == 1 - pages["pages_fetched"] / pages["pages_wanted"]
            llm.reset_stats()
            assert llm.stats()["pages"]["pages_wanted"] == 0
    # 20 steps, two layers, two KV heads, four pages: the first, one by choice and the two newest,
    # which lie in the unfinished block from its second page on: tokens 961 to 1020.
    assert wanted["nothing kept"] == fetched["nothing kept"]
    assert wanted["everything kept"] == wanted["nothing kept"]
    assert 20 * 2 * 2 * 2 <= wanted["nothing kept"] <= 20 * 2 * 2 * 2 + 20 * 2 * 2
    # At most all 14 pages before the unfinished block, each once.
    assert 2 * 2 * 2 <= fetched["everything kept"] <= 2 * 2 * 14


def test_pages_are_fetched_ahead(sharp: Path) -> None:
    """The second layer's, so at most half; most of those guessed are wanted then."""
    counts = {}
    for prefetch in (0, 0.125, 1):
        options = MODES["nothing kept"] | budget(512, decode_prefetch=prefetch)
        with open_llm(sharp, **options) as llm:
            generate(llm, [prompt_of(1000)], 21)
            counts[prefetch] = llm.stats()["pages"]
    ahead = {prefetch: pages["pages_fetched_ahead"] for prefetch, pages in counts.items()}
    assert 0 == ahead[0] < ahead[0.125] < ahead[1] <= counts[0]["pages_wanted"] / 2
    for pages in counts.values():
        assert pages["pages_wanted"] == counts[0]["pages_wanted"]
        hits = pages["hit_rate"] * pages["pages_wanted"]
        assert 0.6 * pages["pages_fetched_ahead"] <= hits <= pages["pages_fetched_ahead"] + 1e-6


@pytest.mark.parametrize("forgotten", ["_placed", "_fetched", "_noted", "_beside_compute"])
def test_what_is_fetched_ahead_is_ordered(
    sharp: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """Hazard: slots and index change beside the compute stream, after a use, before the next."""
    if forgotten == "_beside_compute":
        monkeypatch.setattr(HotPages, forgotten, lambda _, stream, layer_id: stream.entered())
    else:
        event = property(lambda _: None, lambda *_: None)
        monkeypatch.setattr(HotPages, forgotten, event, raising=False)
    with (
        open_llm(sharp, **MODES["fetched ahead"], **budget(256)) as llm,
        pytest.raises(HazardError),
    ):
        generate(llm, [prompt_of(900)], 3)


def test_another_sequence_finds_no_pages_of_the_last(sharp: Path) -> None:
    with open_llm(sharp, **MODES["everything kept"], **budget(256)) as llm:
        outputs = [
            generate(llm, [prompt_of(900, seed)], 30, logprobs=VOCAB_SIZE)[0] for seed in (1, 2, 1)
        ]
    assert_same_answer(outputs[2], outputs[0])
    with open_llm(sharp, **MODES["resident"], **budget(256)) as llm:
        assert_same_answer(
            outputs[1], generate(llm, [prompt_of(900, 2)], 30, logprobs=VOCAB_SIZE)[0]
        )


def test_a_page_is_read_after_its_block_has_arrived(
    sharp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: kernels that read host memory wait for copies on their way there."""
    with open_llm(sharp, **MODES["everything kept"], **budget(256)) as llm:
        generate(llm, [prompt_of(900)], 200)
        monkeypatch.setattr(HostWriter, "host_ready", lambda *_: [])
        with pytest.raises(HazardError):
            generate(llm, [prompt_of(900, 1)], 2)


def test_memory_that_no_kernel_can_read_is_refused(
    sharp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(sharp, **MODES["everything kept"], **budget(256)) as llm:
        monkeypatch.setattr(HostPool, "all_pinned", False)
        (output,) = generate(llm, [prompt_of(300)], 3)
    assert_marked(output, "refused to pin", "cpu_memory_gb")


# Options.


def test_the_budget_in_blocks(sharp: Path) -> None:
    in_blocks = budget(4096, sparse_topk_blocks=2, sparse_threshold_blocks=5)
    policy = QuestPolicy.from_config(Config(model="demo", kvcache_block_size=128, **in_blocks))
    assert policy.pages == QuestPolicy(256, 64, num_dense_tokens=640).pages
    assert (policy.pages.num_pages, policy.pages.num_dense) == (4, 10)


@every_mode
def test_short_contexts_attend_densely(sharp: Path, mode: str) -> None:
    """Up to 640 tokens everything, from there on four pages."""
    policy = QuestPolicy(256, 64, num_dense_tokens=640)
    options = {"decode_hot_cache_gb": 0} if mode == "nothing kept" else {}
    with open_llm(sharp, decode_policy=policy, **for_object(mode), **options) as llm:
        short, crossing = generate(llm, [prompt_of(600), prompt_of(620)], 40, logprobs=VOCAB_SIZE)
    assert_same_greedy(short.token_ids, sharp, prompt_of(600))
    reference = QuestReference(sharp, 64, 4, 2, num_dense=10)
    logits = reference.logits(prompt_of(620), crossing.token_ids)
    assert reference.num_dropped == 19 * 2 * 2 * 7  # steps, layers, KV heads; 4 of 11 pages
    torch.testing.assert_close(
        whole_distribution([crossing])[0], logits.log_softmax(-1), atol=LOGPROB_TOLERANCE, rtol=0
    )


def for_object(mode: str) -> dict[str, Any]:
    """Return a mode's options for a policy that is given as an object, or for dense decode."""
    return {name: value for name, value in MODES[mode].items() if not name.startswith("decode_")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sparse_policy": "QUEST"}, ("QuestPolicy", "no prefill", "decode_policy")),
        ({"decode_token_budget": 512}, ("decode_token_budget", "decode_policy=QUEST")),
        (budget(127), ("decode_token_budget=127", "128")),
        (budget(512, decode_page_size=48), ("decode_page_size=48", "16, 32, 64, 128")),
        (budget(512, decode_hot_cache_gb=1), ("decode_hot_cache_gb", "enable_offload")),
        (budget(512, sparse_topk_blocks=0), ("sparse_topk_blocks=0",)),
        (budget(512, kvcache_block_size=96), ("kvcache_block_size=96", "64", "QuestPolicy")),
    ],
    ids=str,
)
def test_options_that_do_not_fit(
    tiny: Tiny, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        open_llm(tiny(), **options)
    assert all(word in str(error.value) for word in words), error.value


def test_a_hot_cache_too_small(tiny: Tiny) -> None:
    with pytest.raises(CapacityError, match=r"decode_hot_cache_gb=1e-05 holds .* 16, .* GiB"):
        open_llm(tiny(), **OFFLOADED, **budget(1024, decode_hot_cache_gb=1e-5))
