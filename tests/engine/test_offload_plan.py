"""How host and device memory are shared out, and what is refused, bounded or only warned of."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import assert_same_greedy, generate, open_llm, prompt_of, steps_of

from nanovllm import CapacityError, ConfigError, SamplingParams
from nanovllm.config import Config
from nanovllm.device import HostMemory
from nanovllm.engine import loading, offload_plan
from nanovllm.engine.offload_plan import (
    OffloadPlan,
    plan_hot_slots,
    plan_offload,
    plan_whole_prefill,
)
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.page_budget import PageBudget

Tiny = Callable[..., Path]

GIB = 1 << 30
# 32 layers of 8 KV heads of 128: a block of 1,024 tokens takes 4 MiB a layer, 128 MiB in all.
LAYOUT = KVLayout(32, 1024, 8, 128, torch.bfloat16)


@dataclass
class FakeDevice:
    """As much of a device as a plan looks at."""

    kind: str = "cuda"
    total: int = 80 * GIB
    free: int = 60 * GIB
    name: str = "a device"

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind)

    def total_memory_bytes(self) -> int:
        return self.total

    def free_memory_bytes(self) -> int:
        return self.free


@pytest.fixture(autouse=True)
def sixteen_gib_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_plan, "free_host_bytes", lambda: 16 * GIB)


@pytest.fixture
def warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """Return a function that returns the warnings logged so far."""
    monkeypatch.setattr(logging.getLogger("nanovllm"), "propagate", True)
    caplog.set_level(logging.WARNING, "nanovllm")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def config(**options: Any) -> Config:
    return Config(model="none", enable_offload=True, **options)


def plan(model_len: int = 131072, **options: Any) -> OffloadPlan:
    return plan_offload(config(**options), FakeDevice(), LAYOUT, model_len, "the reason given")


# Host memory.


@pytest.mark.parametrize(
    ("options", "num_blocks"),
    [
        ({}, 64),  # half of 16 GiB
        ({"cpu_memory_gb": 10}, 80),
        ({"cpu_memory_gb": 0.99}, 7),
        ({"cpu_memory_gb": 0.125}, 1),
        ({"num_kvcache_blocks": 3}, 3),
        ({"num_kvcache_blocks": 3, "cpu_memory_gb": 10}, 3),
        ({"num_kvcache_blocks": -1}, 64),
        # What requests in flight do not use holds the prefixes of earlier ones.
        ({"cpu_memory_gb": 10, "max_num_seqs": 1}, 80),
        ({"num_kvcache_blocks": 50, "max_num_seqs": 3}, 50),
    ],
)
def test_blocks_in_host_memory(options: dict[str, Any], num_blocks: int) -> None:
    assert plan(3500, **options).num_host_blocks == num_blocks


def test_what_fits_is_not_bounded(warnings: Callable[[], list[str]]) -> None:
    made = plan(3500, max_model_len=3500, cpu_memory_gb=0.5)
    assert (made.num_host_blocks, made.max_model_len) == (4, 3500)
    assert made.length_reason == "the reason given"
    assert warnings() == []


def test_a_length_that_was_asked_for_and_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError) as refused:
        plan(131072, max_model_len=131072, cpu_memory_gb=10)
    # 128 blocks of 128 MiB are needed, and 80 are there.
    for words in ("max_model_len=131072 needs 16 GiB", "80 blocks", "10 GiB", "cpu_memory_gb"):
        assert words in str(refused.value)


def test_a_length_that_nobody_asked_for_is_bounded(warnings: Callable[[], list[str]]) -> None:
    made = plan(131072, cpu_memory_gb=10)
    assert made.max_model_len == 80 * 1024
    assert re.search("80 blocks of 1024 tokens, 10 GiB; raise cpu_memory_gb", made.length_reason)
    assert warnings() == [
        "max_model_len 131072 is bounded to the 81920 tokens that the host KV cache holds"
    ]


@pytest.mark.parametrize("max_model_len", [None, 100])
@pytest.mark.parametrize("gib", [0, 0.12])
def test_less_than_a_block_is_refused(gib: float, max_model_len: int | None) -> None:
    with pytest.raises(CapacityError) as refused:
        plan(100, cpu_memory_gb=gib, max_model_len=max_model_len)
    needed_and_there = f"1024 tokens needs 0.125 GiB, and cpu_memory_gb={gib} gives {gib} GiB"
    assert needed_and_there in str(refused.value)


def test_a_machine_without_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_plan, "free_host_bytes", lambda: GIB // 8)
    with pytest.raises(CapacityError, match=r"50% of the 0\.1 GiB free gives 0\.0625 GiB"):
        plan()


def test_more_than_the_system_reports_is_allowed(warnings: Callable[[], list[str]]) -> None:
    assert plan(cpu_memory_gb=20).num_host_blocks == 160
    assert warnings() == [
        "cpu_memory_gb=20: the host KV cache may grow to 20.0 GiB, more than the 16.0 GiB that the "
        "system reports as free"
    ]
    assert plan(cpu_memory_gb=16).num_host_blocks == 128
    assert len(warnings()) == 1
    assert plan(num_kvcache_blocks=129).num_host_blocks == 129
    assert len(warnings()) == 2


def test_a_ring_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"num_gpu_blocks=100000: .* on a device, and 60"):
        plan(num_gpu_blocks=100000)


@pytest.mark.parametrize(
    "options",
    [
        {"cpu_memory_gb": 1},
        {"num_gpu_blocks": 4},
        {"prefill_order": "chunk"},
        {"enable_nvtx": True},
    ],
    ids=str,
)
def test_options_of_offload_are_refused_without_it(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"^{name}=.*enable_offload=True"):
        Config(model="none", **options)


def test_host_memory_that_is_not_there_fails_one_request(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one finds the memory that has become free."""
    options = {"enable_offload": True, "kvcache_block_size": 128, "num_kvcache_blocks": 8}
    prompt = prompt_of(300)
    with open_llm(tiny(), **options) as llm:
        expected = generate(llm, [prompt], 5)[0].token_ids
    with open_llm(tiny(), **options) as llm:
        device = llm.engine.device
        allocate = device.allocate_host

        def refuse(shape: tuple[int, ...], dtype: torch.dtype) -> HostMemory:
            raise MemoryError("no pages")

        monkeypatch.setattr(device, "allocate_host", refuse)
        params = SamplingParams(temperature=0, max_tokens=5)
        for piece in llm.stream([prompt, prompt], params):
            if piece.index == 0:
                assert piece.output is not None
                assert piece.output.finish_reason == "error"
                assert "cannot grow beyond 0.0" in str(piece.output.error)
                monkeypatch.setattr(device, "allocate_host", allocate)
            elif piece.output is not None:
                assert piece.output.token_ids == expected
        llm.engine.check_integrity()


# Ring and staging.


@pytest.mark.parametrize(
    ("block_size", "max_model_len", "options", "num_slots"),
    [
        (1024, 131072, {}, 64),
        (128, 131072, {}, 512),
        (131072, 131072, {}, 2),
        (1024, 20000, {}, 40),  # twice what the longest request has
        (1024, 10, {}, 2),
        (1024, 131072, {"num_gpu_blocks": 2}, 2),
        (1024, 10, {"num_gpu_blocks": 7}, 7),
    ],
)
def test_slots(
    block_size: int, max_model_len: int, options: dict[str, Any], num_slots: int
) -> None:
    layout = KVLayout(1, block_size, 8, 128, torch.bfloat16)
    options = {"kvcache_block_size": block_size} | options
    made = plan_offload(config(**options), FakeDevice(), layout, max_model_len, "")
    assert made.num_slots == num_slots


@pytest.mark.parametrize(
    ("chunk", "max_model_len", "num_staging"),
    [
        (16384, 131072, 16),  # 64 MiB of 4 MiB each
        (2000, 131072, 4),  # two chunks
        (16384, 2000, 4),
        (1, 131072, 2),
    ],
)
def test_staging(chunk: int, max_model_len: int, num_staging: int) -> None:
    assert plan(max_model_len, max_num_batched_tokens=chunk).num_staging == num_staging


# Layer-major prefill.

TOKEN_BYTES = 8192 + 4096 + 512  # hidden state, keys and values, rotary angles


def whole(
    device: FakeDevice, activation_bytes: int = 0, model_len: int = 131072, **options: Any
) -> int:
    return plan_whole_prefill(config(**options), device, model_len, TOKEN_BYTES, activation_bytes)


def test_tokens_of_a_layer_major_prefill() -> None:
    # 90% of 80 GiB, less 20 that are taken and 2 for activations.
    tokens = (50 * GIB) // TOKEN_BYTES
    assert whole(FakeDevice(), 2 * GIB) == tokens
    assert whole(FakeDevice(), 2 * GIB, prefill_order="layer") == tokens
    assert whole(FakeDevice(), 2 * GIB, prefill_order="chunk") == 0
    assert whole(FakeDevice(), 2 * GIB, gpu_memory_utilization=0.5) == (18 * GIB) // TOKEN_BYTES
    assert whole(FakeDevice("cpu", free=10 * GIB)) == int(2.5 * GIB) // TOKEN_BYTES


@pytest.mark.parametrize("order", ["auto", "layer", "chunk"])
def test_a_chunk_that_does_not_fit_is_refused(order: str) -> None:
    device = FakeDevice(total=10 * GIB, free=GIB + 16384 * TOKEN_BYTES + 2 * GIB)
    assert whole(device, 2 * GIB, prefill_order=order) == (0 if order == "chunk" else 16384)
    device.free -= 1
    with pytest.raises(CapacityError) as refused:
        whole(device, 2 * GIB, prefill_order=order)
    for words in ("16384 tokens needs 2.20 GiB on a device", "2.20 GiB are left", "Lower max_num"):
        assert words in str(refused.value)


def test_no_chunk_is_longer_than_a_request() -> None:
    device = FakeDevice("cpu", free=4 * 1000 * TOKEN_BYTES)
    assert whole(device, model_len=1000) == 1000
    with pytest.raises(CapacityError, match="a chunk of 1001 tokens"):
        whole(device, model_len=1001)


def prefill_bytes_read(llm: Any) -> int:
    return llm.stats()["transfers"]["prefill"]["h2d"]["key_bytes"]


LENGTHS = (200, 301, 300, 700)
OFFLOADED = {"enable_offload": True, "kvcache_block_size": 128, "max_num_batched_tokens": 100}


def test_layer_major_refuses_a_prompt_that_is_too_long(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "plan_whole_prefill", lambda *_: 300)
    directory, prompts = tiny(), [prompt_of(n) for n in LENGTHS]
    with open_llm(directory, prefill_order="layer", **OFFLOADED) as llm:
        outputs = generate(llm, prompts, 5)
        assert [o.finish_reason for o in outputs] == ["length", "error", "length", "error"]
        for output, length in zip(outputs[1::2], LENGTHS[1::2], strict=True):
            for words in ("prefill_order='layer'", f"{length} tokens", "300", "'auto'"):
                assert words in output.error
        for output, prompt in zip(outputs[::2], prompts[::2], strict=True):
            assert_same_greedy(output.token_ids, directory, prompt)
        llm.reset_stats()
        generate(llm, [prompt_of(300, seed=1)], 1)
        assert prefill_bytes_read(llm) == 0


@pytest.mark.parametrize(
    ("order", "prefills"),
    [
        # What is left of a long prompt goes layer-major once it fits.
        ("auto", [200, 100, 201, 300, 100, 100, 100, 100, 300]),
        ("chunk", [100] * 2 + [100] * 3 + [1] + [100] * 3 + [100] * 7),
    ],
)
def test_a_prompt_that_is_too_long_goes_chunk_major(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, order: str, prefills: list[int]
) -> None:
    proper = plan_whole_prefill
    monkeypatch.setattr(loading, "plan_whole_prefill", lambda *args: min(300, proper(*args)))
    directory, prompts = tiny(), [prompt_of(n) for n in LENGTHS]
    with open_llm(directory, prefill_order=order, **OFFLOADED) as llm:
        outputs, counts = steps_of(llm, prompts, 5)
        assert prefill_bytes_read(llm) > 0
    assert [prefill for prefill, _ in counts if prefill] == prefills
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_same_greedy(output.token_ids, directory, prompt)


def test_by_default_a_prompt_goes_layer_major(tiny: Tiny) -> None:
    with open_llm(tiny(), **OFFLOADED) as llm:
        _, counts = steps_of(llm, [prompt_of(700)], 1)
        assert prefill_bytes_read(llm) == 0
    assert counts == [(700, 0)]


def test_one_chunk_needs_no_order(tiny: Tiny) -> None:
    with open_llm(tiny(), prefill_order="chunk", **OFFLOADED | {"max_num_batched_tokens": 700}) as (
        llm
    ):
        _, counts = steps_of(llm, [prompt_of(700)], 1)
        assert prefill_bytes_read(llm) == 0
    assert counts == [(700, 0)]


# Rows and hot slots of decode that chooses pages: 8 MiB for 64 tokens of all layers and heads.

BUDGET = PageBudget(page_size=64, num_pages=64, num_recent=4)


def plan_pages(device: FakeDevice, **options: Any) -> tuple[int, int]:
    config = Config(model="demo", enable_offload=True, decode_policy="QUEST", **options)
    return plan_hot_slots(config, device, LAYOUT, BUDGET, max_blocks=128, num_host_blocks=512)


@pytest.mark.parametrize(
    ("device", "options", "plan"),
    [
        (FakeDevice(), {"max_num_seqs": 1}, (1, 256)),
        (FakeDevice(free=120 * GIB), {}, (8, 256)),
        # 512 blocks have an index of 5.0 GiB; a quarter of the rest is 1,759 slots.
        (FakeDevice(), {}, (8, 219)),
        (FakeDevice(free=12 * GIB), {}, (3, 74)),
        (FakeDevice(), {"decode_hot_cache_gb": 0}, (8, 64)),
        (FakeDevice(), {"decode_hot_cache_gb": 1}, (2, 64)),
        (FakeDevice(), {"decode_hot_cache_gb": 4, "max_num_seqs": 2}, (2, 256)),
        (FakeDevice(free=120 * GIB), {"decode_hot_cache_gb": 64, "max_num_seqs": 1}, (1, 2048)),
        (FakeDevice(kind="cpu"), {}, (8, 64)),
    ],
)
def test_pages_on_the_device(
    device: FakeDevice, options: dict[str, Any], plan: tuple[int, int]
) -> None:
    assert plan_pages(device, **options) == plan


def test_pages_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CapacityError, match=r"index of 512 host blocks.*decode_token_budget"):
        plan_pages(FakeDevice(free=5 * GIB))
    with pytest.raises(CapacityError, match=r"decode_hot_cache_gb=0.4 .* 0.50 GiB"):
        plan_pages(FakeDevice(), decode_hot_cache_gb=0.4)
