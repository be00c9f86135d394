"""The public interface: results, their order, streams, and that nothing is ever left over."""

import copy
import gc
import json
import math
import pickle

import pytest
from rigged_models import BOS_TEMPLATE, byte_level_tokenizer, chain, write_model

from nanovllm import LLM, ConfigError, RequestOutput, SamplingParams
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sampler import Sampler
from nanovllm.engine.text import PromptEncoder

NUM_BLOCKS = 16
USER = {"role": "user", "content": "a"}
KEYS = [
    "text",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "error",
    "num_prompt_tokens",
    "num_cached_tokens",
    "ttft_ms",
    "decode_ms",
    "logprobs",
]


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """The directory of a model that counts: after token i comes i + 1, after the last token 0."""
    tokenizer = byte_level_tokenizer(chat_template=BOS_TEMPLATE)
    logits = chain(len(tokenizer), range(len(tokenizer)))
    return write_model(tmp_path_factory.mktemp("counting"), logits, tokenizer)


@pytest.fixture
def open_llm(counting):
    """A function that loads the counting model; what it loaded is checked and closed at the end."""
    opened = []

    def load(**options):
        options = {"num_kvcache_blocks": NUM_BLOCKS, "kvcache_block_size": 16} | options
        opened.append(LLM(counting, device="cpu", dtype="float32", **options))
        return opened[-1]

    yield load
    for llm in opened:
        assert_nothing_left(llm)
        llm.close()


@pytest.fixture
def llm(open_llm):
    return open_llm()


def assert_nothing_left(llm):
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished()
    assert llm.engine.num_free_blocks == llm.engine._scheduler.block_manager.num_blocks


def count(prompt, num_tokens):
    """What the counting model answers."""
    return [(prompt[-1] + 1 + i) % 258 for i in range(num_tokens)]


# generate


def test_result(llm):
    (output,) = llm.generate([[9, 10, 66]], greedy(3), use_tqdm=False)
    assert isinstance(output, dict)
    assert list(output) == KEYS
    assert output["text"] == output.text == llm.tokenizer.decode([67, 68, 69])
    assert output["token_ids"] == output.token_ids == [67, 68, 69]
    assert (output.finish_reason, output.stop_reason, output.error) == ("length", None, None)
    assert (output.num_prompt_tokens, output.num_cached_tokens) == (3, 0)
    assert output.ttft_ms > 0
    assert output.decode_ms > 0
    assert output.logprobs is None


def test_result_of_a_refused_prompt(llm):
    (output,) = llm.generate([[]], use_tqdm=False)
    assert list(output) == KEYS
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "error")
    assert output.error
    assert math.isnan(output.ttft_ms)


def test_result_is_plain_data(llm):
    (output,) = llm.generate([[5]], greedy(3), use_tqdm=False)
    assert json.loads(json.dumps(output)) == output
    for made in (copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert (made, type(made)) == (output, RequestOutput)
    with pytest.raises(AttributeError, match="texts"):
        output.texts  # noqa: B018


@pytest.mark.parametrize("max_num_seqs", [1, 3, 256])
def test_results_come_in_the_order_of_the_prompts(open_llm, max_num_seqs):
    """Though long answers end after short ones that began later; twice on one engine."""
    llm = open_llm(max_num_seqs=max_num_seqs)
    prompts = [[9 * i, 5 * i + 2] for i in range(1, 25)]
    lengths = [1 + (7 * i) % 11 for i in range(len(prompts))]
    for order in (1, -1):
        outputs = llm.generate(
            prompts[::order], [greedy(n) for n in lengths[::order]], use_tqdm=False
        )
        assert [output.token_ids for output in outputs] == [
            count(p, n) for p, n in zip(prompts[::order], lengths[::order], strict=True)
        ]


def test_one_sampling_params_for_all_or_one_each(llm):
    prompts = [[5], [50]]
    both = llm.generate(prompts, greedy(4), use_tqdm=False)
    each = llm.generate(prompts, (greedy(4), greedy(2)), use_tqdm=False)
    default = llm.generate(prompts, use_tqdm=False)
    assert [len(output.token_ids) for output in both + each] == [4, 4, 4, 2]
    assert [len(output.token_ids) for output in default] == [64, 64]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([greedy(2)], "1 sampling_params for 2 prompts"),
        ([greedy(2)] * 3, "3 sampling_params for 2 prompts"),
        ([greedy(2), {"temperature": 0}], "no SamplingParams"),
        ({"temperature": 0, "max_tokens": 2}, "no SamplingParams"),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_wrong_sampling_params_are_refused_before_work_starts(llm, method, params, message):
    with pytest.raises(ConfigError, match=message):
        list(getattr(llm, method)([[5], [6]], params))
    assert_nothing_left(llm)


def test_no_prompts(llm):
    assert llm.generate([], use_tqdm=False) == llm.chat([], use_tqdm=False) == []
    assert list(llm.stream([])) == []


@pytest.mark.parametrize(("use_tqdm", "shown"), [(True, True), (False, False)])
def test_progress_bar(llm, capfd, use_tqdm, shown):
    llm.generate([[5], [6]], greedy(2), use_tqdm=use_tqdm)
    assert ("Generating: 100%" in capfd.readouterr().err) == shown


def test_chat_takes_one_conversation_or_several(llm):
    (one,) = llm.chat([USER], greedy(3), use_tqdm=False)
    several = llm.chat([[USER], [USER, USER]], [greedy(3), greedy(2)], use_tqdm=False)
    assert [len(output.token_ids) for output in several] == [3, 2]
    assert one.token_ids == several[0].token_ids == count(llm.tokenizer.encode("]"), 3)


# stream


def test_pieces_of_a_stream(llm):
    prompts = [[5], [], [50, 60], [66]]
    params = [greedy(3), greedy(3), greedy(5), greedy(4)]
    pieces = list(llm.stream(prompts, params))
    whole = llm.generate(prompts, params, use_tqdm=False)
    for index, output in enumerate(whole):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == output.text
        assert [token for piece in mine for token in piece["token_ids"]] == output.token_ids
        assert [piece.output is None for piece in mine] == [True] * (len(mine) - 1) + [False]
        assert mine[-1].output.token_ids == output.token_ids
        assert mine[-1].output.finish_reason == output.finish_reason
    assert [piece.index for piece in pieces[:4]] == [1, 0, 2, 3], "one piece a step and request"
    assert len(pieces) == 1 + 3 + 5 + 4


def test_stream_yields_while_it_computes(llm):
    """The first piece comes when the request is not done."""
    stream = llm.stream([[5]], greedy(4))
    assert next(stream).token_ids == [6]
    assert llm.engine.has_unfinished()
    assert [piece.token_ids for piece in stream] == [[7], [8], [9]]


@pytest.mark.parametrize("num_pieces", [0, 1, 4])
def test_abandoned_stream_leaves_nothing(llm, num_pieces):
    stream = llm.stream([[5], [50], [60]], greedy(40))
    for _ in range(num_pieces):
        next(stream)
    assert llm.engine.has_unfinished() == (num_pieces > 0), "control: there is something to leave"
    del stream
    gc.collect()
    assert_nothing_left(llm)
    (output,) = llm.generate([[70]], greedy(3), use_tqdm=False)
    assert output.token_ids == [71, 72, 73]


def test_streams_and_generate_interleave(llm):
    """A call brings on the requests of streams that are under way, and disturbs none of them."""
    first, second = llm.stream([[5]], greedy(6)), llm.stream([[50]], greedy(9))
    next(first), next(second)
    (output,) = llm.generate([[100]], greedy(3), use_tqdm=False)
    assert output.token_ids == count([100], 3)
    last = [piece.output for stream in (second, first) for piece in stream if piece.output]
    assert [output.token_ids for output in last] == [count([50], 9), count([5], 6)]


# failures


def fail_at(monkeypatch, owner, name, error, should_fail):
    """Make `owner.name` raise `error` when `should_fail(*arguments)`; then it works again."""
    original = getattr(owner, name)

    def failing(self, *args):
        if should_fail(*args):
            raise error
        return original(self, *args)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("method", ["append", "finish"])
def test_request_that_cannot_be_processed_harms_no_other(llm, monkeypatch, method):
    """Its own result is marked; its neighbours' are as ever."""
    original = getattr(Detokenizer, method)

    def failing(self, *args):
        if 52 in [*self._token_ids, *args]:
            raise RuntimeError("no such character")
        return original(self, *args)

    monkeypatch.setattr(Detokenizer, method, failing)
    first, second, third = llm.generate([[5], [50], [100]], greedy(9), use_tqdm=False)
    assert (second.finish_reason, second.token_ids, second.text) == ("error", [], "")
    assert second.error == "RuntimeError: no such character"
    assert [first.token_ids, third.token_ids] == [count([5], 9), count([100], 9)]
    (again,) = [piece for piece in llm.stream([[50]], greedy(9)) if piece.output]
    assert (again.output.finish_reason, again.token_ids, again.text) == ("error", [], "")
    assert_nothing_left(llm)


def counter_reaches(number):
    calls = iter(range(100))
    return lambda *args: next(calls) == number


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("out of memory")], ids=repr)
@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [(ModelRunner, "run", 0), (ModelRunner, "run", 3), (Sampler, "sample", 3)],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_failed_step_leaves_nothing(open_llm, monkeypatch, method, owner, name, calls, error):
    """Neither the requests of the step nor the one that waits for its turn."""
    llm = open_llm(max_num_seqs=2)
    prompts = [list(range(40)), [50], [100]]
    with monkeypatch.context() as patch:
        fail_at(patch, owner, name, error, counter_reaches(calls))
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            list(getattr(llm, method)(prompts, greedy(9)))
    assert_nothing_left(llm)
    outputs = llm.generate(prompts, greedy(9), use_tqdm=False)
    assert [output.token_ids for output in outputs] == [count(p, 9) for p in prompts]


def test_interrupt_between_the_requests_of_a_step(llm, monkeypatch):
    """Neither stream hangs: some of a step's requests have their token and others do not."""
    first, second = llm.stream([[5]], greedy(9)), llm.stream([[50]], greedy(9))
    next(first), next(second)
    fail_at(monkeypatch, Detokenizer, "append", KeyboardInterrupt, counter_reaches(1))
    with pytest.raises(KeyboardInterrupt):
        list(first)
    assert [piece.output.finish_reason for piece in second if piece.output] == ["abort"]
    assert_nothing_left(llm)


def test_waiting_requests_survive_a_failed_step(open_llm, monkeypatch):
    llm = open_llm(max_num_seqs=1)
    first, second = (llm.engine.add_request([token], greedy(3)) for token in (5, 50))
    fail_at(monkeypatch, ModelRunner, "run", RuntimeError("out of memory"), counter_reaches(1))
    llm.engine.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.engine.step()
    while llm.engine.has_unfinished():
        llm.engine.step()
    assert [first.finish_reason, second.finish_reason] == ["abort", "length"]
    assert second.output().token_ids == count([50], 3)


def test_error_while_prompts_are_queued_leaves_nothing(llm, monkeypatch):
    fail_at(monkeypatch, PromptEncoder, "encode", OSError("disk"), lambda prompt: prompt == [7])
    with pytest.raises(OSError, match="disk"):
        llm.generate([[5], [6], [7], [8]], greedy(3), use_tqdm=False)
    assert_nothing_left(llm)


# close


def test_closed_llm(counting):
    with LLM(counting, device="cpu", num_kvcache_blocks=NUM_BLOCKS) as llm:
        stream = llm.stream([[5]], greedy(9))
        next(stream)
    llm.close()  # once more does no harm
    assert [piece.output.finish_reason for piece in stream] == ["abort"]
    for call in (lambda: llm.generate([[5]], use_tqdm=False), lambda: list(llm.stream([[5]]))):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_context_manager_lets_errors_through(counting):
    with (
        pytest.raises(ZeroDivisionError),
        LLM(counting, device="cpu", num_kvcache_blocks=NUM_BLOCKS) as llm,
    ):
        1 / 0  # noqa: B018
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[5]], use_tqdm=False)


# nano-vllm's own scripts

EXAMPLE = """
import os
from nanovllm import LLM, SamplingParams
from transformers import AutoTokenizer

path = os.path.expanduser("~/huggingface/Qwen3-0.6B/")
tokenizer = AutoTokenizer.from_pretrained(path)
llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)

sampling_params = SamplingParams(temperature=0.6, max_tokens=256)
prompts = [
    "introduce yourself",
    "list all prime numbers within 100",
]
prompts = [
    tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        tokenize=False,
        add_generation_prompt=True,
    )
    for prompt in prompts
]
outputs = llm.generate(prompts, sampling_params)

for prompt, output in zip(prompts, outputs):
    print(f"Prompt: {prompt!r}")
    print(f"Completion: {output['text']!r}")
"""
BENCH = """
import os
from random import randint, seed
from nanovllm import LLM, SamplingParams

seed(0)
path = os.path.expanduser("~/huggingface/Qwen3-0.6B/")
llm = LLM(path, enforce_eager=False, max_model_len=4096)
prompt_token_ids = [[randint(2, 257) for _ in range(randint(10, 40))] for _ in range(8)]
sampling_params = [
    SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=randint(2, 9)) for _ in range(8)
]
llm.generate(["Benchmark: "], SamplingParams())
outputs = llm.generate(prompt_token_ids, sampling_params, use_tqdm=False)
"""


@pytest.fixture
def home(tmp_path, counting, monkeypatch):
    """A home directory with the model where nano-vllm's scripts look for one."""
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "Qwen3-0.6B").symlink_to(counting)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_nano_vllm_example(home, capsys):
    names = {}
    exec(EXAMPLE, names)
    tokenizer, (first, second) = names["tokenizer"], names["outputs"]
    answer = count(tokenizer.encode("]"), 256)
    answer = answer[: answer.index(0) + 1]
    assert first["token_ids"] == second["token_ids"] == answer
    assert capsys.readouterr().out.count(f"Completion: {tokenizer.decode(answer[:-1])!r}") == 2
    names["llm"].close()


def test_nano_vllm_benchmark(home):
    names = {}
    exec(BENCH, names)
    for prompt, params, output in zip(
        names["prompt_token_ids"], names["sampling_params"], names["outputs"], strict=True
    ):
        assert output["token_ids"] == count(prompt, params.max_tokens)
    names["llm"].close()
