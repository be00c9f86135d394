"""A KV cache in host memory on a CUDA device: against a resident one, and under random delays."""

import gc
from functools import cache

import pytest
import torch
from jitter import delayed_streams
from no_waits import forbid_waits

from nanovllm import LLM, SamplingParams
from nanovllm.device.hazards import HazardError
from nanovllm.eval.needle import build_task, run_task
from nanovllm.ops.block_sparse import TILE

pytestmark = pytest.mark.gpu

# In bf16, two steps of a logit between 16 and 32; in fp32, sums in another order.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
CHUNK = 1500
MODES = {
    "layer-major": {"prefill_order": "layer"},
    "layer-major, 3 slots": {"prefill_order": "layer", "num_gpu_blocks": 3},
    "chunk-major": {"prefill_order": "chunk"},
    "chunk-major, 2 slots": {"prefill_order": "chunk", "num_gpu_blocks": 2},
    "chunk-major, small blocks": {"prefill_order": "chunk", "kvcache_block_size": 128},
    "cudnn": {"attention_backend": "cudnn"},
    "torch": {"attention_backend": "torch"},
}
SOAK_PROMPTS = 200
"""How many prompts the soak runs, each twice."""


@cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = (7, 1024, 5001)
    return [torch.randint(49152, (n,), generator=generator).tolist() for n in lengths]


def open_llm(dtype: str, **options) -> LLM:
    options = {
        "max_model_len": 6144,
        "gpu_memory_utilization": 0.4,
        "max_num_batched_tokens": CHUNK,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    } | options
    return LLM("demo", dtype=dtype, **options)


def open_offloaded(dtype: str, **options) -> LLM:
    return open_llm(dtype, **{"enable_offload": True, "cpu_memory_gb": 2} | options)


def generate(llm: LLM, several: list[list[int]], max_tokens: int):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=8)
    outputs = llm.generate(several, params, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    llm.engine.check_integrity()
    return outputs


@cache
def resident_outputs(dtype: str):
    with open_llm(dtype, num_kvcache_blocks=64) as llm:
        return generate(llm, prompts(), 16)


def first_logits(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Return the logits that follow a prompt, as the runner gives them."""
    run, seen = llm.engine._runner.run, []

    def watched(step):
        seen.append(run(step))
        return seen[-1]

    llm.engine._runner.run = watched
    try:
        generate(llm, [prompt], 1)
    finally:
        llm.engine._runner.run = run
    return seen[-1].clone()


def assert_steps_do_not_wait(llm: LLM, max_tokens: int) -> None:
    """Once warm, no step that the runner computes makes the host wait for the device."""
    generate(llm, prompts(), max_tokens)
    calls = forbid_waits(llm)
    generate(llm, prompts(), max_tokens)
    # Where tiles are chosen, a chunk is whole ones.
    assert max(calls) >= CHUNK - CHUNK % TILE


def assert_nearly_same_choice(ours, theirs, dtype: str) -> None:
    """The tokens agree up to a place where the other engine's two best nearly tie."""
    for place, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
        if a != b:
            row = theirs.logprobs[place]
            assert a in row, f"token {place} is none of the other engine's best"
            assert row[b] - row[a] <= NEAR_TIE[dtype], f"token {place}"
            return


@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_tokens_as_resident(dtype, mode, checked, monkeypatch):
    if dtype == "float32" and mode == "cudnn":
        pytest.skip("cuDNN attention is for half precision")
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", str(int(checked)))
    with open_offloaded(dtype, **MODES[mode]) as llm:
        outputs = generate(llm, prompts(), 16)
        traffic = llm.stats()["transfers"]["prefill"]
    assert (traffic["h2d"]["num_copies"] > 0) == (MODES[mode].get("prefill_order") == "chunk")
    for output, other in zip(outputs, resident_outputs(dtype), strict=True):
        assert_nearly_same_choice(output, other, dtype)


@pytest.mark.parametrize("order", ["layer", "chunk"])
def test_small_case(tiny, order):
    """A tiny model, for compute-sanitizer (docs/offload.md): two slots, odd lengths."""
    options = {"dtype": "bfloat16", "max_num_batched_tokens": 200, "gpu_memory_utilization": 0.1}
    several = [[i % 300 for i in range(n)] for n in (5, 700)]
    with LLM(tiny(), num_kvcache_blocks=8, enforce_eager=True, **options) as llm:
        expected = generate(llm, several, 20)
    options |= {"enable_offload": True, "cpu_memory_gb": 0.1, "kvcache_block_size": 128}
    with LLM(tiny(), prefill_order=order, num_gpu_blocks=2, **options) as llm:
        outputs = generate(llm, several, 20)
    for output, other in zip(outputs, expected, strict=True):
        assert_nearly_same_choice(output, other, "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_major_is_bit_for_bit_resident(dtype):
    with open_llm(dtype, num_kvcache_blocks=64) as resident, open_offloaded(dtype) as offloaded:
        for prompt in prompts():
            ours, theirs = first_logits(offloaded, prompt), first_logits(resident, prompt)
            assert torch.equal(ours, theirs), f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("order", ["layer", "chunk"])
def test_steps_do_not_wait_for_the_device(order):
    with open_offloaded("bfloat16", prefill_order=order) as llm:
        assert_steps_do_not_wait(llm, 20)


def test_memory_does_not_grow_over_100_chunks():
    with open_offloaded("bfloat16", prefill_order="chunk", max_num_batched_tokens=256) as llm:
        generate(llm, [prompts()[-1]], 4)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            generate(llm, [prompts()[-1]], 4)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before


def test_new_tokens_across_blocks():
    prompt = prompts()[1]
    options = {"max_model_len": 4096, "kvcache_block_size": 128}
    with open_llm("float32", num_kvcache_blocks=32, **options) as llm:
        expected = generate(llm, [prompt], 600)
    with open_offloaded("float32", **options) as llm:
        outputs = generate(llm, [prompt], 600)
    assert_nearly_same_choice(outputs[0], expected[0], "float32")


def test_two_at_once(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", "1")
    with open_offloaded("bfloat16", prefill_order="chunk") as llm:
        expected = generate(llm, prompts(), 8)
    with open_offloaded("bfloat16", prefill_order="chunk") as a, open_offloaded("bfloat16") as b:
        for prompt, other in zip(prompts(), expected, strict=True):
            (ours,) = generate(a, [prompt], 8)
            generate(b, [prompt[::-1]], 8)
            assert (ours.token_ids, ours.logprobs) == (other.token_ids, other.logprobs)


def test_dropped_without_being_closed():
    """What it pinned is given back, so that the same pages can be pinned again."""
    answers = []
    for _ in range(3):
        llm = open_offloaded("bfloat16", prefill_order="chunk")
        answers.append([output.logprobs for output in generate(llm, prompts(), 8)])
        made = llm.engine._runner._engine.pool._maker.pieces
        assert all(piece.result().is_pinned for piece in made.values())
        del llm, made
        gc.collect()
    assert answers[0] == answers[1] == answers[2]


def test_needle_at_32k():
    with LLM("demo", enable_offload=True, cpu_memory_gb=2, max_model_len=33000) as llm:
        result = run_task(llm, build_task(llm.tokenizer, 32768, 0.31))
        assert llm.stats()["kv_host_bytes"] > 0
    assert result.passed, result.answer


def test_a_missing_wait_is_found(monkeypatch):
    """Control: the checker works on this device too."""
    from nanovllm.device.cuda import CudaStream
    from nanovllm.device.hazards import CheckedStream

    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", "1")
    wait = CheckedStream.wait

    def deaf(self, event):
        if not self.name.startswith("offload"):
            wait(self, event)

    with open_offloaded("bfloat16") as llm:
        assert isinstance(llm.engine.device.compute_stream.stream, CudaStream)
        monkeypatch.setattr(CheckedStream, "wait", deaf)
        with pytest.raises(HazardError):
            generate(llm, [prompts()[-1]], 1)
        monkeypatch.undo()


SOAK_MODES = {
    "layer-major": {"prefill_order": "layer", "max_num_batched_tokens": 4096},
    "chunk-major": {"prefill_order": "chunk", "max_num_batched_tokens": 4096},
    "chunk-major, 3 slots": {
        "prefill_order": "chunk",
        "max_num_batched_tokens": 8192,
        "num_gpu_blocks": 3,
    },
    "prefix cache": {"prefill_order": "auto", "enable_prefix_caching": True},
    "chunk-major, sparse": {
        "prefill_order": "chunk",
        "max_num_batched_tokens": 8192,
        "sparse_policy": "XATTN_BSA",
        "sparse_threshold": 0.9,
    },
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", SOAK_MODES)
def test_soak(mode, monkeypatch):
    """Random delays on every stream, poisoned slots and the order checker change not one bit."""
    generator = torch.Generator().manual_seed(len(mode))
    count = -(-SOAK_PROMPTS // len(SOAK_MODES))
    several = []
    for _ in range(count):
        length = int(torch.randint(8192, 32769, (1,), generator=generator))
        several.append(torch.randint(49152, (length,), generator=generator).tolist())
        if len(several) % 3 == 0:  # shares the half of a prompt before
            several[-1][: length // 2] = several[-2][: length // 2]
    options = {"max_model_len": 32900, "cpu_memory_gb": 4} | SOAK_MODES[mode]
    with open_offloaded("bfloat16", **options) as llm:
        expected = generate(llm, several, 4)
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", "1")
    with open_offloaded("bfloat16", **options) as llm, delayed_streams(seed=count) as delays:
        outputs = generate(llm, several, 4)
        print(f"\n{mode}: {count} prompts, delays {delays}")
    names = {"compute", "offload 0", "offload 1", "transfer 0", "transfer 1"}
    assert names <= delays.keys()
    for output, other in zip(outputs, expected, strict=True):
        assert output.token_ids == other.token_ids
        assert output.logprobs == other.logprobs
