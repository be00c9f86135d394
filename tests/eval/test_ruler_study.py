"""Answers are kept, resumed and refused as they should; intervals and tests say what is known."""

import json
import math
from dataclasses import asdict, replace

import pytest
from rigged_models import byte_level_tokenizer
from ruler_answers import FULL_ANSWER, full
from tiny_models import make_model

from nanovllm import LLM, ConfigError
from nanovllm.eval.ruler import generate
from nanovllm.eval.ruler.answers import AnswerFile, answer_samples
from nanovllm.eval.ruler.policies import make_policy, parse_policy
from nanovllm.eval.ruler.statistics import mean_difference, mean_score, sign_test
from nanovllm.eval.ruler.study import Plan, Study, tasks_in
from nanovllm.kvcache.sparse.registry import SparsePolicyType

SETTINGS = {"model": "demo", "seed": 0, "data_dir": None}

# The file of answers


def test_answers_are_read_back(tmp_path):
    path = tmp_path / "new" / "answers.jsonl"
    AnswerFile(path, SETTINGS).add(full([1.0, 0.5]))
    file = AnswerFile(path, SETTINGS)
    assert file.answers == full([1.0, 0.5])
    file.add(full([0.25], task="cwe"))
    assert AnswerFile(path, SETTINGS).answers == [
        *full([1.0, 0.5]),
        *full([0.25], task="cwe"),
    ]


def test_what_is_no_file_of_answers_is_called_so(tmp_path):
    path = tmp_path / "answers.jsonl"
    AnswerFile(path, SETTINGS).add(full([1.0]))
    with pytest.raises(ConfigError, match="holds answers of other settings"):
        AnswerFile(path, SETTINGS | {"seed": 1})
    row = asdict(FULL_ANSWER)
    del row["prompt"]
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=r"answers\.jsonl:3 is no answer"):
        AnswerFile(path, SETTINGS)


# Runs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("model"))
    byte_level_tokenizer(adds_bos=True).save_pretrained(path)
    return path


OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 1800}


def test_a_failed_prompt_does_not_harm_the_others(model):
    with LLM(model, **OPTIONS) as llm:
        samples = generate("vt", llm.tokenizer, 1200, 3)
        samples[1] = generate("vt", llm.tokenizer, 2000, 2)[1]
        found, errors = answer_samples(llm, samples, policy="FULL", length=1200)
    assert [answer.index for answer in found] == [0, 2]
    assert len(errors) == 1
    assert errors[0].startswith("vt 1200 sample 1: the prompt has ")
    for answer, sample in zip(found, samples[::2], strict=True):
        assert answer.num_prompt_tokens == len(sample.token_ids)
        assert answer.num_output_tokens == 30
        assert answer.ttft_ms > 0


@pytest.mark.parametrize("offload", [False, True])
def test_times_to_the_first_token_leave_the_wait_out(model, offload):
    """They add up to no more than the whole run, which those with the wait exceed."""
    options = OPTIONS | ({"enable_offload": True, "kvcache_block_size": 128} if offload else {})
    with LLM(model, **options, max_num_batched_tokens=512) as llm:
        samples = generate("vt", llm.tokenizer, 1200, 6)
        results = []
        run = llm.generate
        llm.generate = lambda *args: results.extend(run(*args)) or results
        found, _ = answer_samples(llm, samples, policy="FULL", length=1200, max_new_tokens=2)
    whole = max(result.ttft_ms + result.decode_ms for result in results)
    assert sum(result.ttft_ms for result in results) > whole
    assert sum(answer.ttft_ms for answer in found) <= whole
    assert all(answer.ttft_ms > 0 for answer in found)


def test_a_study_runs_each_sample_once_and_the_model_only_if_need_be(model, tmp_path, monkeypatch):
    path, full = tmp_path / "answers.jsonl", parse_policy("full")
    shown = []

    def study(**plan):
        plan = Plan(tasks=["vt", "niah_single_1"], lengths=[1200], **plan)
        return Study(plan, AnswerFile(path, SETTINGS), shown.append)

    first = study(num_samples=2).run(model, full, OPTIONS)
    assert [answer.key for answer in first] == [
        ("FULL", task, 1200, index) for task in ("vt", "niah_single_1") for index in (0, 1)
    ]
    assert [line.split(":")[0] for line in shown] == ["FULL vt 1200", "FULL niah_single_1 1200"]
    more = study(num_samples=3).run(model, full, OPTIONS)
    assert [a for a in more if a.index < 2] == first
    assert len(path.read_text(encoding="utf-8").splitlines()) == 1 + 6

    monkeypatch.setattr("nanovllm.eval.ruler.study.LLM", None)
    assert study(indices=[2, 0]).run(model, full, OPTIONS) == [more[2], more[0], more[5], more[3]]


def test_answers_to_other_prompts_are_refused(model, tmp_path):
    file = AnswerFile(tmp_path / "answers.jsonl", SETTINGS)
    file.add([replace(FULL_ANSWER, length=1200)])
    study = Study(Plan(tasks=["vt"], lengths=[1200], num_samples=2), file)
    with pytest.raises(ConfigError, match="sample 0: the file's answer is to another prompt"):
        study.run(model, parse_policy("FULL"), OPTIONS)


def test_folders_without_samples_are_refused(tmp_path):
    (tmp_path / "vt").mkdir()
    with pytest.raises(ConfigError, match="holds no <task>/validation"):
        tasks_in(tmp_path)
    for task in ("vt", "niah_single_1"):
        (tmp_path / task).mkdir(exist_ok=True)
        (tmp_path / task / "validation.jsonl").touch()
    assert tasks_in(tmp_path) == ["niah_single_1", "vt"]


# Policies


def test_policies_are_written_as_texts():
    policy = parse_policy("xattn_bsa:threshold=0.90,stride=16,estimator=row,guard=0.4")
    assert policy.label == "XATTN_BSA:estimator=row,guard=0.4,stride=16,threshold=0.9"
    assert policy.options == {
        "sparse_policy": SparsePolicyType.XATTN_BSA,
        "sparse_threshold": 0.9,
        "sparse_stride": 16,
        "sparse_estimator": "row",
        "sparse_guard": 0.4,
    }
    assert parse_policy(policy.label) == policy
    assert parse_policy("FULL") == make_policy("full", {})
    assert parse_policy("FULL").options == {"sparse_policy": SparsePolicyType.FULL}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("NO", "is none of FULL"),
        ("", "is none of FULL"),
        ("XATTN_BSA:tau=1", "unknown option 'tau'; options: threshold"),
        ("XATTN_BSA:policy=FULL", "unknown option 'policy'"),
        ("XATTN_BSA:threshold", "'threshold' is not of the form name=value"),
        ("XATTN_BSA:threshold=", "is not of the form name=value"),
    ],
)
def test_texts_that_mean_no_policy_are_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_policy(text)


# Statistics


@pytest.mark.parametrize(
    ("scores", "value", "low", "high"),
    [
        ([1] * 10, 1.0, 0.7225, 1.0),
        ([0] * 10, 0.0, 0.0, 0.2775),
        ([1] * 8 + [0] * 2, 0.8, 0.4902, 0.9433),
        ([1] * 45 + [0] * 5, 0.9, 0.7864, 0.9565),
    ],
)
def test_wilson_intervals(scores, value, low, high):
    """Against the tables of Wilson's interval for 10 of 10, 8 of 10, 45 of 50."""
    estimate = mean_score(scores)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(
        (value, low, high), abs=2e-4
    )


def test_differences_of_pairs():
    """By hand: n = 20, two wins and five losses."""
    estimate = mean_difference([1, 1, *[-1] * 5, *[0] * 13])
    assert estimate.value == -3 / 20
    half = 1.959964 * math.sqrt(8 - 9 / 22) / 22
    assert (estimate.low, estimate.high) == pytest.approx((-3 / 22 - half, -3 / 22 + half))


def test_no_difference_in_few_pairs_is_no_proof_of_none():
    few, many = mean_difference([0] * 10), mean_difference([0] * 1000)
    assert few.value == many.value == 0
    assert few.low == -few.high < -0.1
    assert -0.01 < many.low < 0


def test_smaller_differences_give_smaller_intervals():
    wide, narrow = mean_difference([1, -1] * 20), mean_difference([0.25, -0.25] * 20)
    assert narrow.high < wide.high / 2


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(0, 0, 1), (3, 3, 1), (0, 1, 1), (0, 5, 0.0625), (6, 0, 0.03125), (2, 8, 0.109375)],
)
def test_sign_test(wins, losses, p):
    assert sign_test(wins, losses) == p


def test_sign_test_of_many_pairs():
    assert sign_test(900, 1100) == pytest.approx(8.5e-6, rel=0.05)
