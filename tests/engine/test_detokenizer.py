"""Text equals the whole decode, however it grows, and ends before the earliest stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigged_models import (
    byte_level_tokenizer,
    chain,
    ids,
    sentencepiece_tokenizer,
    write_model,
)

from nanovllm import LLM, SamplingParams
from nanovllm.engine.detokenizer import Detokenizer

MARK = "\N{REPLACEMENT CHARACTER}"
WORD = "né🌶!"  # 1, 2, 4 and 1 bytes, no byte twice
WORD_BYTES = WORD.encode()
TOKENIZERS = {
    "byte level": byte_level_tokenizer("ab", "Ġab", "Ġ", "âĢ"),
    "sentencepiece": sentencepiece_tokenizer("▁", "▁▁", "▁ab", "ab", "a", "b", "é"),
    "metaspace": sentencepiece_tokenizer("▁", "▁▁", "▁ab", "ab", "a", "b", "é", metaspace=True),
}


def grow(tokenizer, token_ids, stop=(), streaming=True):
    """Feed tokens as the engine does; return the pieces and the stop string that was found."""
    detokenizer = Detokenizer(tokenizer, stop, streaming)
    pieces, found = [], None
    for token_id in token_ids:
        found = detokenizer.append(token_id)
        pieces.append(detokenizer.take())
        if found is not None:
            break
    else:
        found = detokenizer.finish()
        pieces.append(detokenizer.take())
    assert "".join(pieces) == detokenizer.text
    return pieces, found


def join(lists):
    return [item for part in lists for item in part]


def tokens_for(name):
    """Random tokens, those that make or break characters and spaces more often than others."""
    tokenizer = TOKENIZERS[name]
    bytes_first = 2 if name == "byte level" else 3
    special = st.sampled_from([0, 1])
    any_token = st.integers(0, len(tokenizer) - 1)
    extra = st.integers(bytes_first + 256, len(tokenizer) - 1)
    if name == "byte level":
        spelled = tokenizer.encode(WORD + MARK, add_special_tokens=False)
    else:
        spelled = ids(tokenizer, *(f"<0x{b:02X}>" for b in (WORD + MARK).encode()))
    spelling = st.integers(0, len(spelled)).map(lambda n: spelled[:n])
    tail = st.integers(0, len(spelled)).map(lambda n: spelled[n:])
    one = st.one_of(extra, extra, any_token, special).map(lambda token: [token])
    return st.lists(st.one_of(one, spelling, tail), max_size=12).map(join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data())
def test_growing_equals_the_whole_decode(name, data):
    token_ids = data.draw(tokens_for(name))
    tokenizer = TOKENIZERS[name]
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(grow(tokenizer, token_ids)[0]) == whole
    assert "".join(grow(tokenizer, token_ids, streaming=False)[0]) == whole
    assert "".join(grow(tokenizer, token_ids, stop=["\N{SNOWMAN}"])[0]) == whole


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data())
def test_stop_string_ends_the_text_before_the_earliest_match(name, data):
    """The text is the whole decode up to the earliest match in it, or all of it."""
    token_ids = data.draw(tokens_for(name))
    stop = data.draw(
        st.lists(st.text("ab é🌶" + MARK, min_size=1, max_size=3), min_size=1, max_size=3)
    )
    tokenizer = TOKENIZERS[name]
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    pieces, found = grow(tokenizer, token_ids, stop)
    text = "".join(pieces)
    if found is None:
        assert text == whole
        assert not any(s in whole for s in stop)
    else:
        assert whole.startswith(text + found)
        # What is before the end of the match holds no other one that starts earlier.
        assert min((text + found).find(s) for s in stop if s in text + found) == len(text)


@pytest.mark.parametrize("spaced", [True, False], ids=["space before", "no space before"])
@pytest.mark.parametrize("name", ["sentencepiece", "metaspace"])
def test_sentencepiece_words_stay_apart(tmp_path, name, spaced):
    """C23: the words of a SentencePiece model, whole and streamed, with an emoji in bytes."""
    words = ["▁Hello" if spaced else "Hello", "▁world"]
    tokenizer = sentencepiece_tokenizer("go", *words, metaspace=name == "metaspace")
    path = ids(tokenizer, "go", *words, *(f"<0x{b:02X}>" for b in "🌶".encode()))
    write_model(tmp_path, chain(len(tokenizer), path), tokenizer)
    with LLM(tmp_path, device="cpu", dtype="float32", num_kvcache_blocks=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20)
        (output,) = llm.generate([path[:1]], params, use_tqdm=False)
        pieces = [piece.text for piece in llm.stream([path[:1]], params)]
    assert output.token_ids == [*path[1:], tokenizer.eos_token_id]
    assert output.text == tokenizer.decode(path[1:]) == "Hello world🌶"
    assert "".join(pieces) == output.text
    assert pieces[:2] == ["Hello", " world"]


@pytest.fixture(scope="module")
def speller(tmp_path_factory):
    """A model that spells né🌶! byte by byte after an `a`, and then ends."""
    tokenizer = byte_level_tokenizer()
    path = tokenizer.encode("a" + WORD)
    logits = chain(len(tokenizer), path)
    directory = write_model(tmp_path_factory.mktemp("speller"), logits, tokenizer)
    with LLM(directory, device="cpu", dtype="float32", num_kvcache_blocks=16) as llm:
        yield llm, path


def text_and_pieces(llm, prompts, max_tokens):
    """Return each prompt's text, whole and in pieces; both must agree."""
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in max_tokens]
    texts = [output.text for output in llm.generate(prompts, params, use_tqdm=False)]
    pieces = [[] for _ in prompts]
    for piece in llm.stream(prompts, params):
        pieces[piece.index].append(piece.text)
    assert list(map("".join, pieces)) == texts
    return texts, pieces


def test_characters_of_several_bytes_come_whole(speller):
    llm, _ = speller
    (text,), (pieces,) = text_and_pieces(llm, ["a"], [20])
    assert text == WORD
    assert [piece for piece in pieces if piece] == list(WORD)


@pytest.mark.parametrize("num_bytes", range(1, 8))
def test_cut_inside_a_character(speller, num_bytes):
    """C22: at most replacement marks at the end."""
    llm, _ = speller
    (text,), _ = text_and_pieces(llm, ["a"], [num_bytes])
    assert text == WORD_BYTES[:num_bytes].decode(errors="replace")
    assert WORD.startswith(text.rstrip(MARK))


def test_prompt_that_ends_inside_a_character(speller):
    """Nothing of the prompt comes back: not the emoji that it began, not the text before that."""
    llm, path = speller
    (text,), (pieces,) = text_and_pieces(llm, [path[:7]], [20])
    assert text == MARK + "!"
    assert [piece for piece in pieces if piece] == [MARK + "!"]


def test_requests_at_different_places(speller):
    llm, path = speller
    texts, _ = text_and_pieces(llm, [path[:1], path[:2], path[:4], path[:8]], [20, 20, 2, 20])
    assert texts == [WORD, WORD[1:], MARK, "!"]


# C25: the prompt's token starts one of these; then the model ends.
PATHS = {
    "0": ["xyENDzw"],
    "1": ["qEN", "Dzz"],
    "2": ["a", "b", "c", "d", "e", "f"],
    "3": ["E", "N", "n"],
    "4": ["h", "hi", "hih"],
}


@pytest.fixture(scope="module")
def stopper(tmp_path_factory):
    extra = [token for path in PATHS.values() for token in path if len(token) > 1]
    tokenizer = byte_level_tokenizer(*extra)
    paths = [ids(tokenizer, start, *path) for start, path in PATHS.items()]
    logits = chain(len(tokenizer), *paths)
    directory = write_model(tmp_path_factory.mktemp("stopper"), logits, tokenizer)
    with LLM(directory, device="cpu", dtype="float32", num_kvcache_blocks=16) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "stop", "text", "found", "num_tokens"),
    [
        ("0", ["END"], "xy", "END", 1),  # inside one token
        ("0", ["w"], "xyENDz", "w", 1),  # its last character
        ("0", ["Dz", "yE", "zw"], "x", "yE", 1),  # the earliest of three in one token
        ("0", ["ND", "END"], "xy", "END", 1),  # the one that starts first, whatever the order
        ("1", ["END"], "q", "END", 2),  # across two tokens
        ("1", ["zz", "ENDz"], "q", "ENDz", 2),
        ("1", ["ENd", "zzz"], "qENDzz", None, 3),  # what was held back comes out
        ("2", ["cd"], "ab", "cd", 4),  # token by token
        ("2", ["bcdX", "ef"], "abcd", "ef", 6),  # a false start inside the text
        ("END2", ["END", "2a"], "abcdef", None, 7),  # the prompt never matches
        ("3", ["END", "ENn"], "", "ENn", 3),  # all of the text
        ("3", ["ENDING"], "ENn", None, 4),
        ("4", ["hihih"], "h", "hihih", 3),  # a match that starts inside a failed one
    ],
)
def test_stop_strings(stopper, prompt, stop, text, found, num_tokens):
    params = SamplingParams(temperature=0.0, max_tokens=20, stop=stop)
    (output,) = stopper.generate(prompt, params, use_tqdm=False)
    assert (output.text, output.stop_reason) == (text, found)
    assert output.finish_reason == "stop"
    assert len(output.token_ids) == num_tokens
    pieces = list(stopper.stream(prompt, params))
    assert "".join(piece.text for piece in pieces) == text
    assert pieces[-1].output.text == text
    assert join(piece.token_ids for piece in pieces) == output.token_ids


def test_held_back_text_comes_out_at_max_tokens(stopper):
    """The text ends with what could have begun a stop string."""
    params = SamplingParams(temperature=0.0, max_tokens=4, stop=["cdX"])
    pieces = list(stopper.stream("2", params))
    assert [piece.text for piece in pieces] == ["a", "b", "", "cd"]
    assert pieces[-1].output.finish_reason == "length"


def test_stop_string_completed_by_the_last_bytes(speller):
    """A stop string is found in text that only the end of the request sets free."""
    llm, _ = speller
    params = SamplingParams(temperature=0.0, max_tokens=5, stop=MARK)
    (output,) = llm.generate("a", params, use_tqdm=False)
    assert (output.text, output.finish_reason, output.stop_reason) == ("né", "stop", MARK)


@pytest.mark.parametrize(("num_steps", "text"), [(1, "n"), (2, f"n{MARK}"), (3, "né")])
def test_a_cancelled_stream_gives_out_what_it_held_back(speller, num_steps, text):
    """Cancelled amid a character, and amid what may become a stop string: nothing is lost."""
    llm, path = speller
    params = SamplingParams(temperature=0.0, max_tokens=9, stop="né🌶?")
    stream = llm.stream([path[:1]], params)
    pieces = [next(stream) for _ in range(num_steps)]
    for seq in list(llm.engine._scheduler.sequences):
        llm.engine.abort(seq)
    pieces += stream
    assert pieces[-1].output.finish_reason == "abort"
    assert "".join(piece.text for piece in pieces) == pieces[-1].output.text == text
