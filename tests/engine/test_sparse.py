"""Sparse prefill: the tiles that the definition chooses, wherever the KV cache lies."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from rigged_models import NUM_HAY, needle_token, question_token, write_retrieval_model
from sparse_parity import TILE, Chooser, SparseReference, chosen_by_mass
from tile_recorder import Recorder
from tiny_models import (
    LOGPROB_TOLERANCE,
    VOCAB_SIZE,
    assert_same_answer,
    assert_same_greedy,
    generate,
    open_llm,
    prompt_of,
    sharpen,
    whole_distribution,
)

from nanovllm import XATTN_BSA, ConfigError
from nanovllm.kvcache.sparse.streaming import StreamingPolicy
from nanovllm.kvcache.sparse.tile_policy import TilePolicy
from nanovllm.kvcache.sparse.xattn_bsa import XAttentionBSAPolicy
from nanovllm.ops.xattn_reference import tile_masses_group as reference_masses

Tiny = Callable[..., Path]

OFFLOADED = {"enable_offload": True, "kvcache_block_size": 128}
MODES: dict[str, dict[str, Any]] = {
    "resident": {"kvcache_block_size": 128},
    "resident, chunks": {"kvcache_block_size": 256, "max_num_batched_tokens": 300},
    "layer-major": OFFLOADED | {"prefill_order": "layer", "max_num_batched_tokens": 200},
    "chunk-major": OFFLOADED | {"prefill_order": "chunk", "max_num_batched_tokens": 400},
    "two slots": OFFLOADED
    | {"prefill_order": "chunk", "max_num_batched_tokens": 200, "num_gpu_blocks": 2},
    "large blocks": OFFLOADED
    | {"prefill_order": "chunk", "max_num_batched_tokens": 130, "kvcache_block_size": 384},
}
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def checked_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", "1")


def xattn(threshold: float, stride: int = 8, estimator: str = "group", **options: Any) -> Any:
    return {
        "sparse_policy": XATTN_BSA,
        "sparse_threshold": threshold,
        "sparse_stride": stride,
        "sparse_estimator": estimator,
        "sparse_min_len": 0,
    } | {f"sparse_{name}": value for name, value in options.items()}


# C53: the original's choice.

LENGTHS = (1024, 1273, 1536)
CHOICES: dict[str, tuple[float, int, str, float]] = {
    "0.6 of S=8": (0.6, 8, "group", 1),
    "0.75 of S=16": (0.75, 16, "group", 1),
    "0.9 of S=8": (0.9, 8, "group", 1),
    "0.7 of rows, S=16": (0.7, 16, "row", 1),
    "0.3 of rows, S=8, guarded": (0.3, 8, "row", 0.95),
}


@pytest.fixture(scope="module")
def sharp(tiny: Tiny) -> Path:
    """A model whose attention is sharp enough to be worth a choice."""
    return tiny(edit=sharpen)


@cache
def reference_of(directory: Path, choice: str) -> SparseReference:
    return SparseReference(directory, chosen_by_mass(*CHOICES[choice]))


@every_mode
@pytest.mark.parametrize("choice", CHOICES)
def test_tiles_and_answers_are_those_of_the_definition(sharp: Path, mode: str, choice: str) -> None:
    threshold, stride, estimator, guard = CHOICES[choice]
    policy = Recorder(threshold, stride, estimator=estimator, guard=guard)
    length = LENGTHS[(list(MODES).index(mode) + list(CHOICES).index(choice)) % 3]
    with open_llm(sharp, sparse_policy=policy, **MODES[mode]) as llm:
        (output,) = generate(llm, [prompt_of(length)], 4, logprobs=VOCAB_SIZE)
        density = llm.stats()["attention"]["tile_density"]
    reference = reference_of(sharp, choice)
    expected = reference.logits(prompt_of(length), output.token_ids).log_softmax(-1)
    for layer_id, tiles in enumerate(reference.tiles):
        for row in range(tiles.shape[1]):
            assert torch.equal(policy.rows[0, layer_id, row], tiles[:, row, : row + 1])
    num_tiles = -(-length // TILE)
    causal = 4 * num_tiles * (num_tiles + 1) / 2
    assert density == pytest.approx(
        sum(int(tiles.sum()) for tiles in reference.tiles) / causal / len(reference.tiles)
    )
    assert density < 0.99
    torch.testing.assert_close(
        whole_distribution([output])[0], expected, atol=LOGPROB_TOLERANCE, rtol=0
    )
    assert output.token_ids == expected.argmax(-1).tolist()


def averaged_over_the_group(threshold: float, stride: int) -> Chooser:
    def choose(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        own = chosen_by_mass(threshold, stride)
        mean = query.unflatten(0, (len(key), -1)).mean(1)
        return own(mean, key).repeat_interleave(len(query) // len(key), 0)

    return choose


def without_the_crossing_tile(threshold: float, stride: int) -> Chooser:
    """Stops before the tile that reaches the threshold."""

    def choose(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        masses, _ = reference_masses(query, key, 0, stride)
        tiles = chosen_by_mass(threshold, stride)(query, key)
        row = torch.arange(tiles.shape[1])
        forced = (row == 0) | (row == row[:, None])
        last = masses.masked_fill(~tiles | forced, float("inf")).argmin(-1, keepdim=True)
        return tiles.scatter(-1, last, False) | (forced & tiles)

    return choose


WRONG: dict[str, Chooser] = {
    "along the diagonal": lambda q, k: chosen_by_mass(0.75, 8)(
        q.unflatten(1, (-1, 8)).flip(2).flatten(1, 2), k
    ),
    "unscaled": lambda q, k: chosen_by_mass(0.75, 8)(q * q.shape[-1] ** 0.5, k),
    "averaged over the group": averaged_over_the_group(0.75, 8),
    "without the crossing tile": without_the_crossing_tile(0.75, 8),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_choice_that_is_off_shows(sharp: Path, wrong: str) -> None:
    """Control: the answers tell the definition from what ports got wrong."""
    with open_llm(sharp, **xattn(0.75, 8)) as llm:
        (output,) = generate(llm, [prompt_of(1024)], 1, logprobs=VOCAB_SIZE)
    ours = whole_distribution([output])[0]
    for choose, same in ((chosen_by_mass(0.75, 8), True), (WRONG[wrong], False)):
        logits = SparseReference(sharp, choose).logits(prompt_of(1024), output.token_ids)
        error = (logits.log_softmax(-1) - ours).abs().max()
        assert (error < LOGPROB_TOLERANCE) == same, error


# The choice does not depend on how the prompt is computed.

CHUNKS = (128, 200, 640, 5000)


@pytest.mark.parametrize("estimator", ["group", "row"])
def test_the_same_tiles_for_any_chunks_blocks_and_orders(sharp: Path, estimator: str) -> None:
    prompts = [prompt_of(1400)]
    seen = []
    for i, mode in enumerate(MODES):
        options = MODES[mode] | {"max_num_batched_tokens": CHUNKS[i % 4]}
        policy = Recorder(0.7, 8, CHUNKS[(i + 1) % 4] // 128 * 128, estimator=estimator)
        with open_llm(sharp, sparse_policy=policy, **options) as llm:
            (output,) = generate(llm, prompts, 3, logprobs=VOCAB_SIZE)
        seen.append((policy.rows, output))
    rows, first = seen[0]
    assert len(rows) == 2 * 11
    for others, output in seen[1:]:
        assert others.keys() == rows.keys()
        assert all(torch.equal(others[key], rows[key]) for key in rows)
        assert_same_answer(output, first)


@every_mode
def test_prefix_hits_and_many_requests(sharp: Path, mode: str) -> None:
    """Chunks that begin after a cached prefix, and beside decodes, choose as fresh ones do."""
    prompts = [prompt_of(1100, seed) for seed in (0, 1)]
    prompts += [[*prompts[0][:900], *prompt_of(300, 2)], prompts[1], prompt_of(50)]
    with open_llm(sharp, num_kvcache_blocks=60, **xattn(0.7), **MODES[mode]) as llm:
        outputs = generate(llm, prompts, 6, logprobs=VOCAB_SIZE)
        again = generate(llm, prompts, 6, logprobs=VOCAB_SIZE)
    block = MODES[mode]["kvcache_block_size"]
    cached = [(len(prompt) - 1) // block * block for prompt in prompts]
    assert [output.num_cached_tokens for output in again] == cached
    fresh = MODES[mode] | {"enable_prefix_caching": False}
    for prompt, one, other in zip(prompts, outputs, again, strict=True):
        with open_llm(sharp, **xattn(0.7), **fresh) as llm:
            (alone,) = generate(llm, [prompt], 6, logprobs=VOCAB_SIZE)
        assert_same_answer(one, alone)
        assert_same_answer(other, alone)


@pytest.mark.parametrize("mode", ["resident", "chunk-major"])
def test_the_next_turn_of_a_chat(sharp: Path, mode: str) -> None:
    """It finds the prompt of the turn before, and not the answer, which attended densely."""
    prompt = prompt_of(900)
    options = MODES[mode] | {"num_kvcache_blocks": 24}
    with open_llm(sharp, **xattn(0.7), **options) as llm:
        (output,) = generate(llm, [prompt], 150)
        turn = [*prompt, *output.token_ids, *prompt_of(200, 1)]
        (hit,) = generate(llm, [turn], 6, logprobs=VOCAB_SIZE)
    assert hit.num_cached_tokens == 900 // 128 * 128
    with open_llm(sharp, **xattn(0.7), **options) as llm:
        (fresh,) = generate(llm, [turn], 6, logprobs=VOCAB_SIZE)
    assert_same_answer(hit, fresh)


@every_mode
def test_dense_layers_and_the_first_tokens(sharp: Path, mode: str) -> None:
    """A layer, and the queries before `min_len`, that attend densely."""
    policy = XAttentionBSAPolicy(0.5, estimator="group", dense_layers=1, min_len=500)
    with open_llm(sharp, sparse_policy=policy, **MODES[mode]) as llm:
        (output,) = generate(llm, [prompt_of(1200)], 3, logprobs=VOCAB_SIZE)
        stats = llm.stats()["attention"]
    choose, calls = chosen_by_mass(0.5, 8), iter(range(2))

    def partly_dense(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        tiles = choose(query, key)
        tiles[:, : 10 if next(calls) == 0 else 4] = True
        return tiles

    logits = SparseReference(sharp, partly_dense).logits(prompt_of(1200), output.token_ids)
    torch.testing.assert_close(
        whole_distribution([output])[0], logits.log_softmax(-1), atol=LOGPROB_TOLERANCE, rtol=0
    )
    first, second = stats["tile_density_by_layer"]
    assert first == 1.0
    assert 10 / 55 < second < 0.95


# Every policy, wherever the cache lies. A policy takes a line here.

POLICIES: dict[str, dict[str, Any]] = {
    "FULL": {"sparse_policy": "FULL"},
    "XATTN_BSA": xattn(0.7),
    "XATTN_BSA, rows": xattn(0.6, 16, "row", guard=0.9),
    "STREAMING": {"sparse_policy": StreamingPolicy(window_tokens=256)},
}


@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_answers_alike_in_every_mode(
    tiny: Tiny, policy: str, heads: tuple[int, int]
) -> None:
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 72}
    directory = tiny(edit=sharpen, **shape)
    prompts = [prompt_of(n) for n in (1, 129, 700, 1025)]
    results = []
    for mode in MODES.values():
        with open_llm(directory, num_kvcache_blocks=24, **mode, **POLICIES[policy]) as llm:
            results.append(generate(llm, prompts, 5, logprobs=VOCAB_SIZE))
    for outputs in results[1:]:
        for ours, theirs in zip(outputs, results[0], strict=True):
            assert_same_answer(ours, theirs)
    if policy == "FULL":
        for output, prompt in zip(results[0], prompts, strict=True):
            assert_same_greedy(output.token_ids, directory, prompt)


# C52: everything kept is dense attention.

ODD_LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 511, 1000, 1025)
HEADS = {
    "4/2": (4, 2, 32, 64),
    "9/3": (9, 3, 64, 72),
    "4/4 of 80": (4, 4, 80, 64),
    "8/1 of 96": (8, 1, 96, 64),
}


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("mode", ["resident, chunks", "layer-major", "chunk-major", "two slots"])
def test_threshold_of_one_is_dense(tiny: Tiny, shape: str, mode: str) -> None:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    directory = tiny(**dict(zip(names, HEADS[shape], strict=True)))
    prompts = [prompt_of(n) for n in ODD_LENGTHS]
    options = MODES[mode] | {"num_kvcache_blocks": 40, "max_num_batched_tokens": 300}
    estimator = ("group", "row")[list(HEADS).index(shape) % 2]
    with open_llm(directory, **options, **xattn(1, estimator=estimator)) as llm:
        outputs = generate(llm, prompts, 4)
        assert llm.stats()["attention"]["tile_density"] == 1.0
    for output, prompt in zip(outputs, prompts, strict=True):
        assert len(output.token_ids) == 4
        assert_same_greedy(output.token_ids, directory, prompt)


# C55: one head of eight looks for a needle.

NEEDLE_TEXT = 2900
# On the borders of tiles, blocks and chunks, beside them and between.
DEPTHS = (
    0,
    1,
    120,
    124,
    127,
    128,
    250,
    256,
    383,
    396,
    512,
    777,
    1019,
    1200,
    1536,
    2044,
    2400,
    2700,
)


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_retrieval_model(tmp_path_factory.mktemp("needles"), 4000, num_heads=8)


def needle_prompt(depth: int, length: int) -> tuple[list[int], int]:
    """Return a text with `length` needle tokens from `depth` on and a question, and the answer."""
    random = Random(depth)
    question, answer = random.randrange(8), random.randrange(8)
    text = [random.randrange(NUM_HAY) for _ in range(NEEDLE_TEXT)]
    text[depth : depth + length] = [needle_token(question, answer)] * length
    return [*text, question_token(question)], question_token(answer)


def num_found(directory: Path, depths: Sequence[int], length: int, **options: Any) -> int:
    """Return how many needles are found that are as long as the estimate's stride."""
    prompts, answers = zip(*(needle_prompt(depth, length) for depth in depths), strict=True)
    with open_llm(directory, num_kvcache_blocks=30, max_model_len=3000, **options) as llm:
        outputs = generate(llm, prompts, 1)
        assert llm.stats()["attention"]["tile_density"] < 0.97
    pairs = zip(outputs, answers, strict=True)
    return sum(output.token_ids == [answer] for output, answer in pairs)


@pytest.mark.parametrize("mode", ["resident", "chunk-major"])
@pytest.mark.parametrize("choice", [(0.5, 8), (0.5, 16), (0.9, 8), (0.9, 16)], ids=str)
def test_one_head_of_eight_finds_its_needle(retrieval: Path, mode: str, choice: Any) -> None:
    found = num_found(retrieval, DEPTHS, choice[1], **MODES[mode], **xattn(*choice))
    assert found == len(DEPTHS)


@pytest.mark.parametrize("mode", ["layer-major", "two slots"])
@pytest.mark.parametrize("choice", [(0.5, 16), (0.9, 8)], ids=str)
def test_it_finds_some_in_the_other_modes(retrieval: Path, mode: str, choice: Any) -> None:
    """Which choose the same tiles, as another test has it."""
    depths = DEPTHS[::4]
    found = num_found(retrieval, depths, choice[1], **MODES[mode], **xattn(*choice))
    assert found == len(depths)


@pytest.mark.parametrize("mode", ["resident", "chunk-major"])
@pytest.mark.parametrize("guard", [1, 0.5])
def test_a_softmax_for_each_row_finds_the_needle(retrieval: Path, mode: str, guard: float) -> None:
    """Even with no mass to speak of, which the guard makes up for."""
    choice = xattn(0.5 if guard == 1 else 0.0, 8, "row", guard=guard)
    assert num_found(retrieval, DEPTHS[::3], 8, **MODES[mode], **choice) == len(DEPTHS[::3])


def test_a_vote_loses_what_few_heads_need(retrieval: Path) -> None:
    """And so does a window, which is blind: controls of the test above."""
    mode = MODES["chunk-major"]
    voted = num_found(retrieval, DEPTHS, 8, **mode, **xattn(0.5, 8, vote_threshold=0.5))
    assert voted < len(DEPTHS)
    window = StreamingPolicy(window_tokens=512)
    blind = num_found(retrieval, DEPTHS, 8, sparse_policy=window, **mode)
    assert 2 <= blind < len(DEPTHS) / 2  # sinks and window hold some


# What is counted, and what crosses the bus.


def test_statistics_by_hand(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten tiles a side; a sink and a window of two leave 1 + 2 + 3 + 7 * 4 of 55."""
    policy = StreamingPolicy(num_sink_tokens=128, window_tokens=256)
    options = OFFLOADED | {"prefill_order": "chunk", "max_num_batched_tokens": 256}
    with open_llm(tiny(), sparse_policy=policy, **options) as llm:
        generate(llm, [prompt_of(1270)], 3)
        stats = llm.stats()
        traffic = stats["transfers"]["prefill"]["h2d"]
        assert stats["attention"] == policy.get_density_stats()
        policy.print_density_stats()
        llm.reset_stats()
        assert policy.get_density_stats()["num_chunks"] == 0
    attention = stats["attention"]
    assert attention["tile_density"] == pytest.approx(34 / 55)
    assert attention["tile_density_by_head"] == [[pytest.approx(34 / 55)] * 4] * 2
    # Chunks of two blocks: history 0, 2, 4, 6, 8, of which a sink and a window of two are needed.
    assert attention["num_chunks"] == 5
    assert attention["total_available_blocks"] == 20
    assert attention["total_selected_blocks"] == 0 + 2 + 3 + 3 + 3
    assert attention["overall_density"] == pytest.approx(11 / 20)
    assert "Tile density:  61.8%" in capsys.readouterr().out
    # This policy looks at no keys: only selected blocks are loaded, a copy for either part. What is
    # begun ahead of the next chunk is this one's blocks, of which some are wanted.
    block_bytes = 128 * 2 * 32 * 4
    assert traffic["value_bytes"] == 2 * 11 * block_bytes
    assert 2 * 11 * block_bytes <= traffic["key_bytes"] < 2 * 20 * block_bytes


def test_keys_cross_the_bus_once_a_chunk_and_layer(sharp: Path) -> None:
    options = OFFLOADED | {"prefill_order": "chunk", "max_num_batched_tokens": 256}
    with open_llm(sharp, **xattn(0.1), **options) as llm:
        generate(llm, [prompt_of(1270)], 1)
        stats = llm.stats()
    traffic = stats["transfers"]["prefill"]["h2d"]
    block_bytes = 128 * 2 * 32 * 4
    # Chunks of two blocks: history 0, 2, 4, 6, 8.
    assert traffic["key_bytes"] == 2 * 20 * block_bytes
    assert traffic["value_bytes"] < traffic["key_bytes"]
    assert traffic["value_bytes"] % block_bytes == 0
    assert traffic["num_copies"] * block_bytes == traffic["key_bytes"] + traffic["value_bytes"]


def test_tiles_after_the_queries_do_not_count(tiny: Tiny) -> None:
    class Everything(TilePolicy):
        log_name = "all"

        def select_tiles(self, source: Any, ctx: Any) -> torch.Tensor:
            num_q_tiles = -(-len(ctx.query) // TILE)
            shape = ctx.query.shape[1], num_q_tiles, ctx.num_history_tokens // TILE + num_q_tiles
            return torch.ones(shape, dtype=torch.bool)

    policy = Everything()
    with open_llm(tiny(), sparse_policy=policy, **MODES["resident, chunks"]) as llm:
        (output,) = generate(llm, [prompt_of(1200)], 3)
    assert policy.get_density_stats()["tile_density"] == 1.0
    assert_same_greedy(output.token_ids, tiny(), prompt_of(1200))


def test_what_is_logged(tiny: Tiny) -> None:
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    options = OFFLOADED | {"prefill_order": "chunk", "max_num_batched_tokens": 256}
    log, listener = logging.getLogger("nanovllm"), Listener()
    level = log.level
    log.addHandler(listener)
    try:
        with open_llm(tiny(), **xattn(1.0), **options) as llm:
            generate(llm, [prompt_of(600)], 1)
            log.setLevel(logging.DEBUG)
            llm.reset_stats()
            generate(llm, [prompt_of(600, seed=1)], 1)
    finally:
        log.setLevel(level)
        log.removeHandler(listener)
    assert [line for line in lines if "[XAttn]" in line] == [
        "[XAttn] chunk=1, available=0, selected=0, chunk_density=0.0%",
        "[XAttn] chunk=2, available=2, selected=2, chunk_density=100.0%",
        "[XAttn] chunk=3, available=4, selected=4, chunk_density=100.0%",
    ]


def test_thresholds_by_layer_and_head(sharp: Path) -> None:
    """A tensor of thresholds: the first head of each layer is dense, the others are not."""
    thresholds = torch.tensor([[1.0, 0.3, 0.3, 0.3], [1.0, 0.6, 0.6, 0.6]])
    policy = XAttentionBSAPolicy(thresholds, estimator="group")
    with open_llm(sharp, sparse_policy=policy) as llm:
        generate(llm, [prompt_of(1200)], 1)
    first, second = policy.get_density_stats()["tile_density_by_head"]
    assert first[0] == second[0] == 1.0
    assert max(first[1:]) < min(second[1:]) < 1.0


@pytest.mark.parametrize("order", ["layer", "chunk"])
def test_a_hundred_chunks_leave_nothing(tiny: Tiny, order: str) -> None:
    options = OFFLOADED | {"prefill_order": order, "max_num_batched_tokens": 128}
    directory = tiny(num_hidden_layers=1, max_position_embeddings=16384)
    states = []
    with open_llm(directory, num_kvcache_blocks=104, **options, **xattn(0.5)) as llm:
        for seed in range(2):
            generate(llm, [prompt_of(100 * 128, seed)], 2)
            gc.collect()
            tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
            states.append((llm.stats()["kv_device_bytes"], len(tensors)))
            del tensors
    assert states[0] == states[1]


# Options that do not fit.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kvcache_block_size": 64}, "kvcache_block_size=64 is not a multiple of 128"),
        ({"max_num_batched_tokens": 100}, "max_num_batched_tokens=100 holds no tile"),
        ({"sparse_estimator": "group", "sparse_stride": 32}, "none of 4, 8, 16"),
        ({"sparse_stride": 4}, "none of 8, 16, 32, 64"),
        ({"sparse_threshold": 11}, "not a number in"),
        ({"sparse_threshold": -0.1}, "not a number in"),
        ({"sparse_chunk_size": 1000}, "is not a multiple of 128"),
        ({"sparse_guard": 2}, "not a number in"),
        ({"sparse_policy": "FULL", "sparse_stride": 16}, "is for sparse_policy=XATTN_BSA"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(tiny: Tiny, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_llm(tiny(), **{"sparse_policy": XATTN_BSA} | options)


def test_a_policy_of_ones_own(tiny: Tiny) -> None:
    """A subclass is given as an object, and needs no registry."""

    class EverySecondTile(TilePolicy):
        log_name = "second"

        def select_tiles(self, source: Any, ctx: Any) -> torch.Tensor:
            num_q_tiles = -(-len(ctx.query) // TILE)
            first = ctx.num_history_tokens // TILE
            q = first + torch.arange(num_q_tiles)[:, None]
            k = torch.arange(first + num_q_tiles)
            return (((q - k) % 2 == 0) & (k <= q)).expand(ctx.query.shape[1], -1, -1)

    def choose(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        place = torch.arange(-(-query.shape[1] // TILE))
        kept = ((place[:, None] - place) % 2 == 0) & (place <= place[:, None])
        return kept.expand(len(query), -1, -1)

    directory = tiny()
    with open_llm(directory, sparse_policy=EverySecondTile(), **MODES["chunk-major"]) as llm:
        (output,) = generate(llm, [prompt_of(900)], 2, logprobs=VOCAB_SIZE)
    logits = SparseReference(directory, choose).logits(prompt_of(900), output.token_ids)
    torch.testing.assert_close(
        whole_distribution([output])[0], logits.log_softmax(-1), atol=LOGPROB_TOLERANCE, rtol=0
    )
