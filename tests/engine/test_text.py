"""Prompts in all their forms become the same ids, and every end token ends a request."""

import json

import numpy as np
import pytest
import torch
from rigged_models import (
    BOS_TEMPLATE,
    SHARES,
    byte_level_tokenizer,
    chain,
    fixed_distribution,
    ids,
    write_model,
)
from transformers import LlamaConfig

from nanovllm import LLM, ConfigError, SamplingParams
from nanovllm.engine.text import PromptEncoder, end_token_ids, load_tokenizer
from nanovllm.prompts import as_prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
USER = {"role": "user", "content": "hi"}
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('no system role here') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)


def open_llm(path, **options):
    return LLM(path, device="cpu", dtype="float32", num_kvcache_blocks=16, **options)


def random_logits(vocab_size, seed=0):
    """Next-token logits whose greedy path depends on every step: a random successor each."""
    return 9 * torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def chatter(tmp_path_factory):
    """A model whose tokenizer adds `<s>` and whose template writes it."""
    tokenizer = byte_level_tokenizer(adds_bos=True, chat_template=BOS_TEMPLATE)
    path = tmp_path_factory.mktemp("chatter")
    with open_llm(write_model(path, random_logits(len(tokenizer)), tokenizer)) as llm:
        yield llm


# C19


def test_one_begin_token_on_every_way_in(chatter):
    """The same content as ids, plain text, templated text and a chat."""
    tokenizer = chatter.tokenizer
    templated = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    plain = templated.removeprefix(tokenizer.bos_token)
    assert templated == "<s>[user]hi[assistant]" != plain
    token_ids = [1, *tokenizer.encode(plain, add_special_tokens=False)]
    outputs = chatter.generate([token_ids, plain, templated], GREEDY, use_tqdm=False)
    outputs += chatter.chat([USER], GREEDY, use_tqdm=False)
    assert [output.num_prompt_tokens for output in outputs] == [len(token_ids)] * 4
    assert [output.token_ids for output in outputs] == [outputs[0].token_ids] * 4
    encoder = chatter.engine.encoder
    assert encoder.encode(plain) == encoder.encode(templated) == token_ids
    assert encoder.encode_chat([USER], None, True) == token_ids


def test_transformers_alone_would_add_a_second_one(chatter):
    """Control: this tokenizer does what the trial is about."""
    assert chatter.tokenizer.encode("<s>hi")[:2] == [1, 1]


def test_begin_token_later_in_the_text_is_no_reason_to_leave_it_out(chatter):
    assert chatter.engine.encoder.encode("a<s>")[0] == 1


# C20


@pytest.fixture(scope="module")
def strict_chatter(tmp_path_factory):
    tokenizer = byte_level_tokenizer(chat_template=NO_SYSTEM)
    path = tmp_path_factory.mktemp("strict")
    with open_llm(write_model(path, random_logits(len(tokenizer)), tokenizer)) as llm:
        yield llm


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ([{"role": "system", "content": "be brief"}, USER], "no system role here"),
        ([USER, USER], "roles must alternate"),
        ([], "empty conversation"),
        ([{"content": "no role"}], "role"),
        (["no message"], "refuses this conversation"),
    ],
)
def test_refused_chat_is_marked_and_the_others_finish(strict_chatter, chat, reason):
    llm = strict_chatter
    outputs = llm.chat([[USER], chat, [USER]], GREEDY, use_tqdm=False)
    assert (outputs[1].finish_reason, outputs[1].token_ids) == ("error", [])
    for part in (reason, "chat_template=", "generate"):
        assert part in outputs[1].error
    (alone,) = llm.chat([USER], GREEDY, use_tqdm=False)
    assert [outputs[0].token_ids, outputs[2].token_ids] == [alone.token_ids] * 2
    assert len(alone.token_ids) > 0


def test_chat_that_comes_to_no_text(strict_chatter):
    (output,) = strict_chatter.chat([USER | {"content": ""}], GREEDY, use_tqdm=False)
    assert (output.finish_reason, output.token_ids) == ("error", [])
    assert "the prompt is empty" in output.error


def test_template_argument_is_the_way_on(strict_chatter):
    chat = [{"role": "system", "content": "be brief"}, USER]
    (output,) = strict_chatter.chat(chat, GREEDY, use_tqdm=False, chat_template=BOS_TEMPLATE)
    assert output.error is None
    assert output.num_prompt_tokens == 1 + len("[system]be brief[user]hi[assistant]")


def test_generation_prompt_can_be_left_out(chatter):
    encoder = chatter.engine.encoder
    assert chatter.tokenizer.decode(encoder.encode_chat([USER], None, False)) == "<s>[user]hi"


def test_no_template(tmp_path):
    tokenizer = byte_level_tokenizer()
    with open_llm(write_model(tmp_path, random_logits(len(tokenizer)), tokenizer)) as llm:
        refused, served = [
            llm.chat([USER], GREEDY, use_tqdm=False, chat_template=template)[0]
            for template in (None, BOS_TEMPLATE)
        ]
    assert refused.finish_reason == "error"
    for part in ("no chat template", "chat_template=", "generate"):
        assert part in refused.error
    assert len(served.token_ids) > 0


def test_no_tokenizer(tmp_path):
    """Text and chats are marked, ids are served, and a stop string is refused as what it is."""
    with open_llm(write_model(tmp_path, fixed_distribution(SHARES, 16))) as llm:
        assert llm.tokenizer is None
        outputs = llm.generate(["text", [1, 2]], GREEDY, use_tqdm=False)
        outputs += llm.chat([USER], GREEDY, use_tqdm=False)
        outputs += llm.generate([[1, 2]], SamplingParams(stop="x"), use_tqdm=False)
    assert [output.finish_reason for output in outputs] == ["error", "length", "error", "error"]
    assert all("tokenizer" in outputs[i].error for i in (0, 2, 3))
    assert (outputs[1].text, outputs[1].token_ids) == ("", [0] * 8)


# C26


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (5, {"eos_token_id": [6, 7]}, {0, 5, 6, 7}),
        (0, {"eos_token_id": 0}, {0}),
        ([0, 5], {"eos_token_id": [0, 6]}, {0, 5, 6}),
        (None, {}, {0}),
        ([5], None, {0, 5}),
        (None, {"eos_token_id": None}, {0}),
    ],
)
def test_end_ids_are_the_union(tmp_path, in_config, in_generation, expected):
    """Numbers and lists, agreeing and not, of both configs; the tokenizer says 0."""
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    config = LlamaConfig(eos_token_id=in_config)
    assert end_token_ids(tmp_path, config, byte_level_tokenizer()) == expected
    assert end_token_ids(tmp_path, config, None) | {0} == expected


@pytest.fixture(scope="module")
def many_ends(tmp_path_factory):
    """Three end ids of three sources, each at the end of a path; none is special but `</s>`."""
    tokenizer = byte_level_tokenizer()
    paths = [ids(tokenizer, *path) for path in ("abcA", "defB", "ghi")]
    in_config, in_generation = ids(tokenizer, "A", "B")
    path = tmp_path_factory.mktemp("ends")
    logits = chain(len(tokenizer), *paths, rest=tokenizer.eos_token_id)
    write_model(path, logits, tokenizer, eos_token_id=in_config)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [in_generation]}))
    with open_llm(path) as llm:
        yield llm


@pytest.mark.parametrize(("prompt", "text"), [("a", "bc"), ("d", "ef"), ("g", "hi")])
def test_each_end_id_stops_and_is_not_in_the_text(many_ends, prompt, text):
    (output,) = many_ends.generate(prompt, GREEDY, use_tqdm=False)
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", None)
    assert len(output.token_ids) == 3, "the end token is among the tokens"


def test_ignore_eos_ignores_all_of_them(many_ends):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for prompt, text in (("a", "bcA"), ("d", "efB"), ("g", "hi")):
        (output,) = many_ends.generate(prompt, params, use_tqdm=False)
        assert (output.text, output.finish_reason) == (text, "length")
        assert len(output.token_ids) == 8


def test_stop_token_ids_hold_under_ignore_eos(many_ends):
    in_config, c = ids(many_ends.tokenizer, "A", "c")
    for stop_id, text in ((in_config, "bc"), (c, "b")):
        params = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=[stop_id])
        (output,) = many_ends.generate("a", params, use_tqdm=False)
        assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", stop_id)


# C47

SAME = [3, 4, 5]


@pytest.mark.parametrize(
    "form",
    [
        SAME,
        tuple(SAME),
        np.array(SAME, dtype=np.int64),
        np.array(SAME, dtype=np.uint16),
        torch.tensor(SAME),
        torch.tensor(SAME, dtype=torch.int16),
        [np.int32(i) for i in SAME],
        [torch.tensor(i) for i in SAME],
        range(3, 6),
        (i for i in SAME),
    ],
    ids=lambda form: type(form).__name__,
)
def test_flat_integers_are_one_prompt(form):
    """A flat list is one prompt, of Python's own integers whatever it was made of."""
    (prompt,) = as_prompts(form)
    assert prompt == SAME
    assert {type(token_id) for token_id in prompt} == {int}


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("text", ["text"]),
        (["text", "more"], ["text", "more"]),
        (["text", SAME, np.array(SAME)], ["text", SAME, SAME]),
        (("text", tuple(SAME)), ["text", SAME]),
        ([SAME, torch.tensor(SAME), [np.int32(i) for i in SAME]], [SAME] * 3),
        (np.array([SAME, SAME]), [SAME, SAME]),
        (torch.tensor([SAME, SAME]), [SAME, SAME]),
        ((p for p in ("text", SAME)), ["text", SAME]),
        ([], []),
        ([[]], [[]]),
        ("", [""]),
    ],
)
def test_lists_of_prompts(prompts, expected):
    assert as_prompts(prompts) == expected


@pytest.mark.parametrize(
    "prompts",
    [
        [1.0, 2.0],
        [[1, 2.0]],
        np.array([1.0, 2.0]),
        torch.tensor([[1.0, 2.0]]),
        [np.float64(1)],
        7,
        None,
        torch.tensor(7),
        ["text", 7],
        [[1, 2], 7],
        [[[1, 2]]],
        [["text"]],
        ["text", None],
        b"text",
        {"prompt": "text"},
        [{"prompt_token_ids": [1, 2]}],
    ],
    ids=repr,
)
def test_what_is_neither_text_nor_integers_is_refused(prompts):
    with pytest.raises(ConfigError, match="text or "):
        as_prompts(prompts)


def test_integers_of_any_kind_hit_the_same_cache(chatter):
    prompt = [i % 250 for i in range(257)]
    forms = [prompt, np.array(prompt), torch.tensor(prompt), [np.int32(i) for i in prompt]]
    outputs = [chatter.generate([form], GREEDY, use_tqdm=False)[0] for form in forms]
    assert [output.token_ids for output in outputs] == [outputs[0].token_ids] * 4
    assert [output.num_cached_tokens for output in outputs] == [0, 256, 256, 256]


# What is no prompt


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("", "empty"),
        ([], "empty"),
        ([-1, 2], "outside the vocabulary"),
        ([2, 10**18], "outside the vocabulary"),
        ([2, 258], "outside the vocabulary of 258: 2 to 258"),
        ("\ud800", "tokenizer refuses"),
    ],
    ids=repr,
)
def test_bad_prompt_is_marked_and_the_others_finish(chatter, prompt, reason):
    outputs = chatter.generate(["good", prompt, "good"], GREEDY, use_tqdm=False)
    assert (outputs[1].finish_reason, outputs[1].token_ids) == ("error", [])
    assert reason in outputs[1].error
    assert [output.error for output in (outputs[0], outputs[2])] == [None, None]


def test_tokenizer_with_more_tokens_than_the_model():
    """Text that the model has no embedding for is refused before it reaches the model."""
    tokenizer = byte_level_tokenizer()
    assert PromptEncoder(tokenizer, len(tokenizer)).encode("z") == tokenizer.encode("z")
    with pytest.raises(ConfigError, match="outside the vocabulary of 50"):
        PromptEncoder(tokenizer, 50).encode("z")


def test_text_without_a_single_token():
    """As a normaliser that strips spaces leaves of a blank prompt; it would wait for ever."""

    class Stripping:
        bos_token = None

        def encode(self, text, add_special_tokens):
            return [3] * len(text.strip())

    assert PromptEncoder(Stripping(), 10).encode(" a ") == [3]
    with pytest.raises(ConfigError, match="empty"):
        PromptEncoder(Stripping(), 10).encode("  ")


# Loading


def test_tokenizer_is_found_or_named(tmp_path):
    assert load_tokenizer(tmp_path) is None
    byte_level_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("a") == byte_level_tokenizer().encode("a")
    (tmp_path / "tokenizer.json").write_text('{"cut": ')
    with pytest.raises(ConfigError, match=f"tokenizer in {tmp_path} cannot be loaded"):
        load_tokenizer(tmp_path)


def test_damaged_generation_config_is_named(tmp_path):
    write_model(tmp_path, fixed_distribution(SHARES, 16))
    for damage in ("{", "[]"):
        (tmp_path / "generation_config.json").write_text(damage)
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            open_llm(tmp_path)
