"""Prompts are tokenised once, under one template and with one begin token; files are read back."""

import json

import pytest
from rigged_models import BOS_TEMPLATE, byte_level_tokenizer
from ruler_tokenizers import CHAT, PLAIN, word_tokenizer
from tiny_models import make_model

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.eval.ruler import generate, read_samples, write_samples

GREEDY = SamplingParams(temperature=0, max_tokens=8)
USER_TEXT = "Which number?"
PREFIX = " It is"


def open_llm(path, chat_template):
    """A random model, on whose answer every token before tells, and a tokenizer that adds `<s>`."""
    make_model(path)
    byte_level_tokenizer(adds_bos=True, chat_template=chat_template).save_pretrained(path)
    return LLM(path, device="cpu", dtype="float32", num_kvcache_blocks=16)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with open_llm(tmp_path_factory.mktemp("plain"), None) as llm:
        yield llm


@pytest.fixture(scope="module")
def chatter(tmp_path_factory):
    with open_llm(tmp_path_factory.mktemp("chatter"), BOS_TEMPLATE) as llm:
        yield llm


def write_rows(directory, *rows, task="vt"):
    (directory / task).mkdir(parents=True)
    text = "\n".join(json.dumps(row) for row in rows)
    (directory / task / "validation.jsonl").write_text(text + "\n\n", encoding="utf-8")


def answer(llm, prompt):
    return llm.generate([prompt], GREEDY, use_tqdm=False)[0].token_ids


# C58


@pytest.mark.parametrize(
    "row",
    [
        {"input": USER_TEXT + PREFIX},
        {"input": USER_TEXT, "answer_prefix": PREFIX},
        {"input": USER_TEXT + PREFIX, "answer_prefix": ""},
        {"input": "<s>" + USER_TEXT, "answer_prefix": PREFIX},
    ],
    ids=["old", "new", "no prefix", "begin token"],
)
def test_files_for_a_model_without_template(plain, tmp_path, row):
    write_rows(tmp_path, {"index": 0, "outputs": ["7"], **row})
    (sample,) = read_samples(tmp_path, "vt", plain.tokenizer, 30)
    text_ids = plain.tokenizer.encode(USER_TEXT + PREFIX, add_special_tokens=False)
    assert sample.token_ids == [1, *text_ids]
    assert sample.length == 1 + len(text_ids) + 30
    assert answer(plain, sample.token_ids) == answer(plain, [1, *text_ids])


@pytest.mark.parametrize(
    "row",
    [
        {"input": USER_TEXT, "answer_prefix": PREFIX},
        {"input": f"<s>[user]{USER_TEXT}[assistant]It is"},
        {"input": f"[user]{USER_TEXT}[assistant]", "answer_prefix": "It is"},
        {"input": f"<s>[user]{USER_TEXT}[assistant]", "answer_prefix": "It is"},
    ],
    ids=["plain", "old, ready", "ready without begin token", "ready"],
)
def test_files_for_a_model_with_template(chatter, tmp_path, row):
    write_rows(tmp_path, {"index": 0, "outputs": ["7"], **row})
    (sample,) = read_samples(tmp_path, "vt", chatter.tokenizer, 30)
    text = f"[user]{USER_TEXT}[assistant]It is"
    ids = [1, *chatter.tokenizer.encode(text, add_special_tokens=False)]
    assert sample.token_ids == ids
    assert answer(chatter, sample.token_ids) == answer(chatter, ids)


def test_a_prompt_without_prefix_is_what_chat_makes_of_it(chatter, tmp_path):
    write_rows(tmp_path, {"index": 0, "outputs": ["7"], "input": USER_TEXT})
    (sample,) = read_samples(tmp_path, "vt", chatter.tokenizer, 30)
    (chat,) = chatter.chat([{"role": "user", "content": USER_TEXT}], GREEDY, use_tqdm=False)
    assert chat.token_ids == answer(chatter, sample.token_ids)
    assert chat.num_prompt_tokens == len(sample.token_ids)


@pytest.mark.parametrize("options", [PLAIN, CHAT], ids=["plain", "chat"])
def test_generated_prompts_are_tokenised_as_one_text(options):
    tokenizer = word_tokenizer(**options)
    for sample in generate("niah_single_2", tokenizer, 1024, 3, seed=0):
        text = sample.input + sample.answer_prefix
        if tokenizer.chat_template:
            text = f"[user]{sample.input}[assistant]{sample.answer_prefix.lstrip()}"
        assert sample.token_ids == [1, *tokenizer.encode(text, add_special_tokens=False)]
        assert sample.token_ids.count(1) == 1


def test_a_second_begin_token_changes_the_answer(plain):
    """Control: the comparisons above would notice it."""
    ids = plain.tokenizer.encode(USER_TEXT + PREFIX)
    assert ids[0] == 1
    assert answer(plain, [1, *ids]) != answer(plain, ids)


@pytest.mark.parametrize("options", [PLAIN, CHAT], ids=["plain", "chat"])
def test_written_samples_are_read_back(options, tmp_path):
    tokenizer = word_tokenizer(**options)
    samples = generate("vt", tokenizer, 700, 3, seed=1)
    others = generate("niah_multikey_1", tokenizer, 700, 2, seed=1)
    write_samples(tmp_path, [*samples, *others])
    assert read_samples(tmp_path, "vt", tokenizer, 30) == samples
    assert read_samples(tmp_path, "niah_multikey_1", tokenizer, 128) == others


def test_fields_of_every_age_are_read(plain, tmp_path):
    write_rows(
        tmp_path,
        {"index": 3, "input": "a", "outputs": ["x", "y"], "length": 9},
        {
            "index": "4",
            "input": "b",
            "outputs": "lone",
            "answer_prefix": None,
            "length": 9,
            "length_w_model_temp": 12,
            "token_position_answer": 3,
        },
        {"index": 5, "input": "c", "outputs": [17]},
    )
    samples = read_samples(tmp_path, "vt", plain.tokenizer, 30)
    assert [sample.index for sample in samples] == [3, 4, 5]
    assert [sample.outputs for sample in samples] == [["x", "y"], ["lone"], ["17"]]
    assert {sample.task for sample in samples} == {"vt"}


@pytest.mark.parametrize(
    "line",
    ["no json", "[]", "{}", '{"index": 0, "input": "a"}', '{"index": 0, "outputs": ["x"]}', "7"],
)
def test_what_is_no_sample_is_refused_with_its_line(plain, tmp_path, line):
    (tmp_path / "vt").mkdir()
    good = json.dumps({"index": 0, "input": "a", "outputs": ["x"]})
    (tmp_path / "vt" / "validation.jsonl").write_text(f"{good}\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"validation\.jsonl:2 is no sample"):
        read_samples(tmp_path, "vt", plain.tokenizer, 30)


def test_missing_files_and_tokenizers_are_refused(plain, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_samples(tmp_path, "vt", plain.tokenizer, 30)
    with pytest.raises(ConfigError, match="no tokenizer"):
        generate("vt", None, 1024, 1)
