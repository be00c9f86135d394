"""Generated samples: as long as asked for, with one right answer, the same for the same seed."""

import json
import re
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from rigged_models import byte_level_tokenizer, sentencepiece_tokenizer
from ruler_tokenizers import CHAT, PLAIN, word_tokenizer

from nanovllm import ConfigError
from nanovllm.eval.haystack import NOISE, Prose
from nanovllm.eval.ruler import TASKS, generate
from nanovllm.eval.ruler.draft import Materials, PieceCounter, fit
from nanovllm.eval.ruler.sample import PromptWriter
from nanovllm.eval.ruler.words import all_words

GENERATED = [name for name, task in TASKS.items() if not task.needs_file]
NIAH = [name for name in GENERATED if name.startswith("niah")]
NEEDLE = re.compile(r"The secret (?:number|code) for (\S+) is (\S+)\.")


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(**PLAIN)


def materials(tokenizer, length, name="vt", seed=0):
    return Materials(
        random=Random(f"{name}/{length}/{seed}"),
        index=0,
        length=length,
        depth=0.4,
        count=PieceCounter(PromptWriter(tokenizer)).total,
        prose=Prose(0),
    )


def question_of(sample):
    return sample.input.rpartition("\n\n")[2]


# Lengths


@pytest.mark.parametrize("length", [3001, 4096, 12288])
@pytest.mark.parametrize("name", GENERATED)
def test_prompts_fill_the_length_but_for_less_than_a_unit(name, length, tokenizer):
    """Another sentence, line or word would be too much."""
    task, writer = TASKS[name], PromptWriter(tokenizer)
    draft = task.draft(materials(tokenizer, length, name))
    max_tokens = length - task.num_answer_tokens
    ((text, token_ids),) = fit([draft], PieceCounter(writer), max_tokens)
    assert len(token_ids) <= max_tokens
    num_units = next(n for n in range(length) if len("".join(draft.pieces(n))) == len(text))
    assert "".join(draft.pieces(num_units)) == text
    assert num_units != draft.max_units
    longer = writer.text("".join(draft.pieces(num_units + 1)), draft.answer_prefix)
    assert len(writer.encode([longer])[0]) > max_tokens


@pytest.mark.parametrize(
    "make",
    [
        lambda: word_tokenizer(**CHAT),
        lambda: word_tokenizer(adds_bos=False),
        lambda: word_tokenizer(prefix_space=True),
        byte_level_tokenizer,
        sentencepiece_tokenizer,
    ],
    ids=["template", "no begin token", "prefix space", "bytes", "sentencepiece"],
)
@pytest.mark.parametrize("name", ["niah_single_2", "niah_multikey_3", "vt", "cwe", "fwe"])
def test_tokenizers_of_all_kinds_are_filled(make, name):
    for sample in generate(name, make(), 9000, 2, seed=4):
        assert sample.length == len(sample.token_ids) + TASKS[name].num_answer_tokens
        assert 9000 - 250 < sample.length <= 9000


def test_long_prompts_are_tokenised_once(tokenizer, monkeypatch):
    """Where the counts of pieces add up, and they do for tokenizers that cut at spaces."""
    encoded = []
    encode = PromptWriter.encode
    monkeypatch.setattr(
        PromptWriter, "encode", lambda self, texts: encoded.extend(texts) or encode(self, texts)
    )
    for name in GENERATED:
        generate(name, tokenizer, 8192, 4, seed=0)
    num_long = sum(len(prompt.text) > 8192 for prompt in encoded)
    assert num_long <= 4 * len(GENERATED) + 2


def test_too_short_lengths_are_refused(tokenizer):
    for name in GENERATED:
        with pytest.raises(ConfigError, match=rf"{name} at length 150: .* too short"):
            generate(name, tokenizer, 150, 1)


def test_unknown_tasks_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"unknown task 'niah'; tasks: niah_single_1, .*qa_2"):
        generate("niah", tokenizer, 1024, 1)


# Needles


def needles_of(sample):
    return NEEDLE.findall(sample.input)


@pytest.mark.parametrize("name", NIAH)
def test_needles_answer_the_question_and_nothing_else_does(name, tokenizer):
    task = TASKS[name].draft
    for sample in generate(name, tokenizer, 4096, 4, seed=7):
        found = needles_of(sample)
        asked = [key for key in dict(found) if key in question_of(sample)]
        assert len(asked) == task.num_asked
        right = [value for key, value in found if key in asked]
        assert sorted(right) == sorted(sample.outputs)
        assert len(sample.outputs) == task.num_asked * task.num_values
        for value in sample.outputs:
            assert sample.input.count(value) == 1
        for key in asked:
            assert sample.input.count(key) == task.num_values + 1
            assert key in sample.answer_prefix
        assert not any(value in sample.answer_prefix for value in sample.outputs)
        counts = Counter(key for key, _ in found)
        assert set(counts.values()) == {task.num_values}
        if task.hay == "needles":
            body = sample.input.partition("\n\n")[2].rpartition("\n\n")[0]
            assert all(NEEDLE.fullmatch(line) for line in body.splitlines())
        else:
            assert len(counts) == task.num_keys
        pattern = r"\d{7}" if task.values == "number" else r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-.{12}"
        assert all(re.fullmatch(pattern, value) for _, value in found)
        assert all(bool(re.fullmatch("[a-z]+-[a-z]+", key)) == task.word_keys for key in counts)


def depth_of(sample):
    """Share of the haystack before the first value that is asked for."""
    body = sample.input.partition("\n\n")[2].rpartition("\n\n")[0]
    return body.index(sample.outputs[0]) / len(body)


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_depths_are_spread_evenly(name, tokenizer):
    """However many samples there are: no part of the text is left out."""
    samples = generate(name, tokenizer, 4096, 21, seed=0)
    for num_samples in (8, 13, 21):
        depths = sorted(map(depth_of, samples[:num_samples]))
        gaps = [after - before for before, after in pairwise([0, *depths, 1])]
        assert max(gaps) < 2 / num_samples + 0.03


def test_needles_stand_between_sentences(tokenizer):
    for sample in generate("niah_multivalue", tokenizer, 3000, 4, seed=0):
        for match in NEEDLE.finditer(sample.input):
            assert re.search(r"\w[^\w\s]+\s+$", sample.input[: match.start()])
            assert re.match(r"\s+[\w“]", sample.input[match.end() :])


def test_the_haystack_has_no_digits_and_its_own_beginning(tokenizer):
    samples = generate("niah_single_2", tokenizer, 4096, 6, seed=0)
    beginnings = set()
    for sample in samples:
        hay = NEEDLE.sub("", sample.input)
        assert not re.search(r"\d", hay)
        beginnings.add(sample.input.partition("\n\n")[2][:80])
    assert len(beginnings) == len(samples)


def test_noise_repeats(tokenizer):
    (sample,) = generate("niah_single_1", tokenizer, 2048, 1, seed=0)
    hay = NEEDLE.sub("", sample.input.partition("\n\n")[2].rpartition("\n\n")[0])
    assert " ".join(hay.split()).startswith(" ".join(NOISE)[:40])
    assert hay.count(NOISE[0]) > 20


# Variables


def test_chains_end_at_the_number(tokenizer):
    for sample in generate("vt", tokenizer, 2048, 6, seed=0):
        held: dict[str, str] = {}
        for name, source in re.findall(r"SET (\w+) = (\w+)\.", sample.input):
            held[name] = held.get(source, source)
        assert list(held) == sample.outputs
        (value,) = set(held.values())
        assert re.fullmatch(r"\d{5}", value)
        assert len(held) == 5
        assert value in question_of(sample)
        assert value in sample.answer_prefix
        for name in sample.outputs:
            assert name not in question_of(sample) + sample.answer_prefix


# Counting


def entries_of(text):
    return re.findall(r"\d+\. (\S+)", text)


@pytest.mark.parametrize(("length", "repeats"), [(2048, (10, 1)), (4096, (30, 3)), (9000, (30, 3))])
def test_common_words_are_the_most_common(tokenizer, length, repeats):
    for sample in generate("cwe", tokenizer, length, 3, seed=0):
        example, _, task = sample.input.rpartition("Below is a numbered list")
        counts = Counter(entries_of(task))
        assert {word for word, _ in counts.most_common(10)} == set(sample.outputs)
        assert sorted(set(counts.values())) == sorted(set(repeats))
        assert all(counts[word] == repeats[0] for word in sample.outputs)
        assert len(counts) > 15
        numbers = [int(number) for number in re.findall(r"(\d+)\.", task)]
        assert numbers == list(range(1, counts.total() + 1))
        listed, _, answered = example.partition("most often are: ")
        assert set(entries_of(answered)) == {
            word for word, _ in Counter(entries_of(listed)).most_common(10)
        }
        assert not set(entries_of(example)) & set(counts)


def test_lists_longer_than_the_words_are_of_pairs(tokenizer):
    (sample,) = generate("cwe", tokenizer, 65536, 1, seed=0)
    words = entries_of(sample.input)
    assert all("-" in word for word in words)
    assert len(set(words)) > 1000


def test_words_are_no_part_of_each_other():
    words = all_words()
    assert len(words) == len(set(words)) > 1600
    assert all(word.isalpha() and word.islower() for word in words)
    joined = "\n".join(words)
    assert [word for word in words if joined.count(word) > 1] == []


@pytest.mark.parametrize("length", [700, 4096, 20000])
def test_coded_words_follow_the_zeta_distribution(tokenizer, length):
    for sample in generate("fwe", tokenizer, length, 3, seed=0):
        words = sample.input.split("\n\n")[1].split()
        counts = Counter(words).most_common(60)
        assert counts[0][0] == "..."
        assert [word for word, _ in counts[1:4]] == sample.outputs
        assert counts[3][1] > counts[4][1]
        for rank, (_, count) in enumerate(counts[:8], 1):
            assert count == pytest.approx(0.6079 * len(words) / rank**2, abs=1)
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in counts[1:])
        # Not in the order of their counts.
        assert len(set(words[:20])) < 20
        assert words.index(sample.outputs[0]) < len(words) / 4


# Questions


@pytest.fixture
def squad(tmp_path):
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"The town of number {i} lies on the river of number {i}.",
                    "qas": [
                        {
                            "question": f"Where does town {i} lie?",
                            "answers": [{"text": f"river of number {i}"}] * 2
                            + [{"text": "on a river"}],
                        },
                        {"question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
            ]
        }
        for i in range(100, 400)
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": articles}), encoding="utf-8")
    return path


@pytest.fixture
def hotpot(tmp_path):
    entries = [
        {
            "question": f"Who built bridge {i}?",
            "answer": f"Builder {i}",
            "context": [
                [f"Bridge {i}", ["It is old.", f" Firm {i} made it."]],
                [f"Firm {i}", ["."]],
            ],
        }
        for i in range(100, 300)
    ]
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def test_questions_come_with_their_document(tokenizer, squad):
    samples = generate("qa_1", tokenizer, 3000, 8, seed=0, question_file=squad)
    places = []
    for sample in samples:
        number = re.search(r"Where does town (\d+) lie", sample.input).group(1)
        assert sample.outputs == [f"river of number {number}", "on a river"]
        documents = re.findall(r"Document (\d+):\nThe town of number (\d+)", sample.input)
        assert [int(n) for n, _ in documents] == list(range(1, len(documents) + 1))
        towns = [town for _, town in documents]
        assert towns.count(number) == 1
        assert len(set(towns)) == len(towns) > 20
        places.append(towns.index(number) / len(towns))
        assert 2900 < sample.length <= 3000
    assert max(places) - min(places) > 0.4
    assert len({sample.outputs[0] for sample in samples}) == 8


def test_questions_over_two_documents_come_with_both(tokenizer, hotpot):
    for sample in generate("qa_2", tokenizer, 2000, 4, seed=0, question_file=hotpot):
        number = sample.outputs[0].removeprefix("Builder ")
        assert sample.input.count(f"Bridge {number}\nIt is old. Firm {number} made it.") == 1
        assert sample.input.count(f"Firm {number}\n.") == 1


def test_all_documents_of_a_short_file_are_taken(tokenizer, hotpot):
    """There is no more filler, so the prompt stays shorter."""
    (sample,) = generate("qa_2", tokenizer, 60000, 1, seed=0, question_file=hotpot)
    assert sample.length < 60000
    assert sample.input.count("Document ") == 400


def test_question_files_are_needed_and_checked(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="qa_1 takes questions from a SQuAD or HotpotQA file"):
        generate("qa_1", tokenizer, 2000, 1)
    path = tmp_path / "other.json"
    for content in ("no json", "7", "{}", '[{"question": 1}]', '{"data": []}'):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match="SQuAD or HotpotQA"):
            generate("qa_1", tokenizer, 2000, 1, question_file=path)


# Seeds


@pytest.mark.parametrize("name", GENERATED)
def test_samples_depend_on_seed_and_index_alone(name, tokenizer):
    samples = generate(name, tokenizer, 2048, 4, seed=5)
    assert generate(name, tokenizer, 2048, 2, seed=5) == samples[:2]
    assert generate(name, tokenizer, 2048, 0, seed=5, indices=[3, 1]) == [samples[3], samples[1]]
    assert len({sample.input for sample in samples}) == 4
    (other,) = generate(name, tokenizer, 2048, 1, seed=6)
    assert other.outputs != samples[0].outputs
    (longer,) = generate(name, tokenizer, 2500, 1, seed=5)
    assert longer.outputs != samples[0].outputs
