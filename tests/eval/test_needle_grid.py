"""Each needle of a grid stands where it should, is looked for once, and counts at its own place."""

from dataclasses import replace

import pytest
from rigged_models import byte_level_tokenizer, chain, write_model

from nanovllm import LLM, ConfigError
from nanovllm.eval.needle_grid import (
    NeedleAnswer,
    NeedleGrid,
    depth_text,
    run_grid,
    spread_depths,
)
from nanovllm.eval.needle_summary import as_text, summarise
from nanovllm.eval.record_file import RecordFile
from nanovllm.eval.ruler.policies import parse_policy

GRID = NeedleGrid(
    lengths=[500, 700], depths=[0.0, 0.5, 1.0], num_repeats=2, seed=3, max_new_tokens=4
)
KNOWN = (700, 0.5, 1)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "kvcache_block_size": 128}
FULL = parse_policy("FULL")


def tokenizer_that_knows(place=KNOWN):
    """Return one token a byte, and one more for the value of a place of the grid."""
    tokenizer = byte_level_tokenizer()
    return byte_level_tokenizer(GRID.task(tokenizer, place).value)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model that answers any prompt with the value that stands at `KNOWN`."""
    tokenizer = tokenizer_that_knows()
    vocab_size = len(tokenizer)
    return write_model(
        tmp_path_factory.mktemp("model"), chain(vocab_size, rest=vocab_size - 1), tokenizer
    )


def open_file(path):
    return RecordFile(path, {}, NeedleAnswer, "needle answer")


@pytest.fixture
def asked(monkeypatch):
    """The calls of `LLM.generate`, each as the lengths of its prompts."""
    calls, generate = [], LLM.generate

    def recorded(self, prompts, *args):
        calls.append([len(prompt) for prompt in prompts])
        return generate(self, prompts, *args)

    monkeypatch.setattr(LLM, "generate", recorded)
    return calls


# Prompts


def test_each_needle_has_its_place_text_and_value():
    tokenizer = byte_level_tokenizer()
    tasks = {place: GRID.task(tokenizer, place) for place in GRID.places}
    assert len(tasks) == 2 * 3 * 2
    for (length, depth, _), task in tasks.items():
        text = tokenizer.decode(task.token_ids)
        assert len(task.token_ids) == length
        assert text.count(task.value) == 1
        body = text[text.index("\n\n") + 2 : text.rindex("\n\n")]
        room = len(body) - len(task.needle)
        assert body.index(task.needle) / room == pytest.approx(depth, abs=120 / room)
    assert len({task.value for task in tasks.values()}) == len(tasks)
    assert all(len(task.value) == 7 and task.value.isdigit() for task in tasks.values())
    texts = {tokenizer.decode(t.token_ids).replace(t.value, "") for t in tasks.values()}
    assert len(texts) == len(tasks)


def test_a_larger_grid_holds_a_smaller_one():
    tokenizer = byte_level_tokenizer()
    larger = replace(GRID, lengths=[400, 500, 700], depths=spread_depths(5), num_repeats=3)
    assert set(GRID.places) < set(larger.places)
    for place in GRID.places:
        assert larger.task(tokenizer, place) == GRID.task(tokenizer, place)
        assert replace(GRID, seed=4).task(tokenizer, place) != GRID.task(tokenizer, place)


def test_depths_are_spread_evenly_with_both_ends():
    assert spread_depths(1) == [0.5]
    assert spread_depths(2) == [0, 1]
    assert spread_depths(5) == [0, 0.25, 0.5, 0.75, 1]
    assert list(map(depth_text, [0, 0.125, 1 / 3, 1])) == ["0%", "12.5%", "33.3%", "100%"]
    with pytest.raises(ConfigError, match="0 depths"):
        spread_depths(0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lengths": []}, r"lengths \[\]: give at least one"),
        ({"lengths": [500, 500]}, "each once"),
        ({"depths": []}, r"depths \[\]: give at least one"),
        ({"depths": [0.5, 1.5]}, r"depth 1.5 is not in \[0, 1\]"),
        ({"num_repeats": 0}, "num_repeats 0"),
    ],
)
def test_impossible_grids_are_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        replace(GRID, **changes)


# Runs


def test_a_needle_is_found_where_the_model_says_its_value_and_nowhere_else(model, asked):
    answers, errors = run_grid(str(model), FULL, GRID, OPTIONS)
    assert errors == []
    assert [answer.place for answer in answers] == GRID.places
    assert [answer.place for answer in answers if answer.passed] == [KNOWN]
    for answer in answers:
        assert answer.policy == "FULL"
        assert answer.value == GRID.task(tokenizer_that_knows(), answer.place).value
        assert set(answer.answer.split()) == {answers[GRID.places.index(KNOWN)].value * 4}
        assert answer.tile_density == 1
        assert answer.ttft_ms > 0
    assert asked == [[500] * 6, [700] * 6]


def test_prompts_of_a_length_go_into_few_calls(model, asked):
    run_grid(str(model), FULL, replace(GRID, lengths=[500], num_repeats=6), OPTIONS)
    assert asked == [[500] * 8, [500] * 8, [500] * 2]


def test_an_interrupted_grid_goes_on_where_it_was(model, asked, tmp_path, monkeypatch):
    path, generate = tmp_path / "grid.jsonl", LLM.generate

    def interrupted(self, prompts, *args):
        if len(prompts[0]) == 700:
            raise KeyboardInterrupt
        return generate(self, prompts, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LLM, "generate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_grid(str(model), FULL, GRID, OPTIONS, open_file(path))
    first = open_file(path).records
    assert [answer.place for answer in first] == GRID.places[:6]

    asked.clear()
    answers, _ = run_grid(str(model), FULL, GRID, OPTIONS, open_file(path))
    assert asked == [[700] * 6]
    assert answers[:6] == first
    assert [answer.place for answer in answers if answer.passed] == [KNOWN]
    assert open_file(path).records == answers

    more, _ = run_grid(str(model), FULL, replace(GRID, num_repeats=3), OPTIONS, open_file(path))
    assert asked[1:] == [[500] * 3, [700] * 3]
    assert [answer for answer in more if answer.repeat < 2] == answers


def test_where_nothing_is_left_the_model_is_not_opened(model, tmp_path, monkeypatch):
    path = tmp_path / "grid.jsonl"
    answers, _ = run_grid(str(model), FULL, GRID, OPTIONS, open_file(path))
    content = path.read_bytes()
    monkeypatch.setattr("nanovllm.eval.needle_grid.LLM", None)
    assert run_grid(str(model), FULL, GRID, OPTIONS, open_file(path)) == (answers, [])
    smaller = replace(GRID, lengths=[700], depths=[1.0])
    assert run_grid(str(model), FULL, smaller, OPTIONS, open_file(path)) == (answers[-2:], [])
    assert path.read_bytes() == content


def test_policies_share_a_file_but_no_answers(model, asked, tmp_path):
    path, small = tmp_path / "grid.jsonl", replace(GRID, lengths=[700], depths=[0.5])
    sparse = parse_policy("XATTN_BSA:estimator=group,stride=8,threshold=0.5,min_len=0")
    dense, _ = run_grid(str(model), FULL, small, OPTIONS, open_file(path))
    found, _ = run_grid(str(model), sparse, small, OPTIONS, open_file(path))
    assert asked == [[700] * 2] * 2
    assert {answer.policy for answer in found} == {sparse.label}
    assert all(0 < answer.tile_density < 1 for answer in found)
    assert open_file(path).records == dense + found


def test_prompts_that_failed_have_no_answer_and_are_tried_again(model, asked, tmp_path):
    path = tmp_path / "grid.jsonl"
    short = OPTIONS | {"max_model_len": 600}
    answers, errors = run_grid(str(model), FULL, GRID, short, open_file(path))
    assert [answer.place for answer in answers] == GRID.places[:6]
    assert len(errors) == 6
    assert errors[3].startswith("length 700, depth 50%, repeat 1: the prompt has 700 tokens")
    assert len(path.read_bytes().splitlines()) == 1 + 6
    asked.clear()
    answers, errors = run_grid(str(model), FULL, GRID, OPTIONS, open_file(path))
    assert (len(answers), errors, asked) == (12, [], [[700] * 6])


# Figures

ANSWER = NeedleAnswer(
    policy="FULL",
    length=500,
    depth=0.0,
    repeat=0,
    value="1234567",
    answer="1234567",
    passed=True,
    ttft_ms=1000.0,
    tile_density=1.0,
)


def answers_of(passed, **changes):
    return [replace(ANSWER, repeat=i, passed=bool(p), **changes) for i, p in enumerate(passed)]


def test_table_shows_each_cell_in_its_place():
    (summary,) = summarise(
        [
            *answers_of([1, 0, 0], length=1000, depth=1.0, ttft_ms=2500.0, tile_density=0.5),
            *answers_of([1, 1, 1], length=1000, depth=0.0, ttft_ms=2500.0, tile_density=0.5),
            *answers_of([0, 0], depth=1 / 3),
            *answers_of([1, 1], depth=0.0),
        ]
    )
    assert as_text(summary).splitlines() == [
        "FULL: 6 of 10 needles found, 70% of the prefill's attention computed",
        "",
        " depth   500  1000",
        "    0%  100%  100%",
        " 33.3%    0%     -",
        "  100%     -   33%",
        "   all   50%   67%",
        "TTFT s  1.00  2.50",
    ]


def test_policies_are_told_apart_in_their_order():
    found = summarise([*answers_of([1], policy="STREAMING"), *answers_of([0, 0])])
    assert [(each.policy, str(each.total)) for each in found] == [
        ("STREAMING", "100%"),
        ("FULL", "0%"),
    ]
    assert summarise([]) == []


@pytest.mark.parametrize(
    ("num_found", "text"), [(0, "0%"), (1, "1%"), (667, "67%"), (999, "99%"), (1000, "100%")]
)
def test_percent_are_rounded_but_never_to_all_or_nothing(num_found, text):
    (summary,) = summarise(answers_of([1] * num_found + [0] * (1000 - num_found)))
    assert str(summary.total) == text
