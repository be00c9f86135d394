"""The engine on a CUDA device, against transformers there and against itself in other modes."""

from functools import cache

import pytest
import torch
from no_waits import forbid_waits
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.eval.needle import build_task, run_task
from nanovllm.tools.demo_model import demo_model_path

pytestmark = pytest.mark.gpu

# Greedy choices may differ where transformers' two best logits lie this close. In fp32 that is the
# rounding of sums in another order; in bf16 two steps of a logit between 16 and 32.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
MODES = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 256},
    "preempting": {"kvcache_block_size": 64, "num_kvcache_blocks": 72},
    "small blocks": {"kvcache_block_size": 16},
    "cudnn": {"attention_backend": "cudnn"},
    "torch": {"attention_backend": "torch"},
}


@cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = (7, 100, 257, 1000, 3000)
    return [torch.randint(49152, (n,), generator=generator).tolist() for n in lengths]


@cache
def theirs(dtype: str):
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=getattr(torch, dtype))
    return model.cuda().eval()


def open_llm(dtype: str, **options) -> LLM:
    options = {"max_model_len": 4096, "gpu_memory_utilization": 0.3, "max_num_seqs": 16} | options
    return LLM("demo", dtype=dtype, **options)


def assert_greedy(prompt: list[int], answer: list[int], dtype: str) -> None:
    """Each token must be transformers' choice after the same tokens, or nearly tie with it."""
    ids = torch.tensor([prompt + answer], device="cuda")
    with torch.inference_mode():
        logits = theirs(dtype)(ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
    assert (logits.max(-1).values - chosen).max().item() <= NEAR_TIE[dtype]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parity_with_transformers(dtype, mode):
    if dtype == "float32" and mode == "cudnn":
        pytest.skip("cuDNN attention is for half precision")
    with open_llm(dtype, **MODES[mode]) as llm:
        for _ in range(2):  # the second time with prefix hits
            outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
            for prompt, output in zip(prompts(), outputs, strict=True):
                assert output.error is None
                assert len(output.token_ids) == 48
                assert_greedy(prompt, output.token_ids, dtype)
        if mode == "preempting":
            assert llm.engine.num_preemptions > 0
        assert max(output.num_cached_tokens for output in outputs) > 0
        llm.engine.check_integrity()


def test_wrong_tokens_are_not_near_ties():
    """Control: the check of parity fails for tokens that transformers would not choose."""
    with pytest.raises(AssertionError):
        assert_greedy(prompts()[1], [1] * 8, "bfloat16")


def test_prefill_and_decode_do_not_wait_for_the_device():
    """A step waits only where its tokens are read; scattered blocks cause no copy that waits."""
    with open_llm("bfloat16", kvcache_block_size=16, enable_prefix_caching=False) as llm:
        llm.generate(prompts()[::-1], GREEDY, use_tqdm=False)  # compiles, and scatters free blocks
        calls = forbid_waits(llm)
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert all(output.error is None for output in outputs)
        assert max(calls) > 100
        assert min(calls) <= 5


def test_memory_does_not_grow():
    with open_llm("bfloat16") as llm:
        llm.generate(prompts(), GREEDY, use_tqdm=False)
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert torch.cuda.memory_allocated() <= before
    assert torch.cuda.memory_allocated() < before / 2


def test_needle_at_32k():
    with LLM("demo", max_model_len=33000, gpu_memory_utilization=0.3) as llm:
        result = run_task(llm, build_task(llm.tokenizer, 32768, 0.31))
    assert result.passed, result.answer
