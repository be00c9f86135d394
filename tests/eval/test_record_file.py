"""Records are kept and resumed, and what is no file of them is refused and left alone."""

import json
from dataclasses import dataclass

import pytest

from nanovllm import ConfigError
from nanovllm.eval.record_file import RecordFile

SETTINGS = {"model": "demo", "seed": 0, "folder": None}


@dataclass(frozen=True)
class Catch:
    fish: str
    weights: list[float]


PIKE, EEL = Catch("“pike”\n", [1.5]), Catch("eel", [])


def open_file(path, settings=SETTINGS):
    return RecordFile(path, settings, Catch, "haul")


def test_records_are_read_back(tmp_path):
    path = tmp_path / "new" / "catch.jsonl"
    open_file(path).add([PIKE, EEL])
    file = open_file(path)
    assert file.records == [PIKE, EEL]
    file.add([EEL])
    assert file.records == [PIKE, EEL, EEL] == open_file(path).records


def test_records_are_on_disk_at_once(tmp_path):
    path = tmp_path / "catch.jsonl"
    file = open_file(path)
    for i in range(3):
        file.add([PIKE])
        assert len(path.read_bytes().splitlines()) == 2 + i


@pytest.mark.parametrize("separator", ["\x85", "\u2028", "\u2029", "\x0c", "\r"])
def test_text_may_hold_other_separators_of_lines(tmp_path, separator):
    path, record = tmp_path / "catch.jsonl", Catch(f"pike{separator}eel", [])
    open_file(path).add([record])
    assert open_file(path).records == [record]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_line_that_was_cut_off_is_dropped(tmp_path, cut):
    path = tmp_path / "catch.jsonl"
    open_file(path).add([PIKE, Catch("a fish with a name that is long enough", [])])
    path.write_bytes(path.read_bytes()[:-cut])
    file = open_file(path)
    assert file.records == [PIKE]
    file.add([EEL])
    assert open_file(path).records == [PIKE, EEL]


def test_other_settings_are_refused_and_named(tmp_path):
    path = tmp_path / "catch.jsonl"
    open_file(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"\(seed: 0 there, 1 now; dtype: None there, 'x' now\)"):
        open_file(path, SETTINGS | {"seed": 1, "dtype": "x"})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"hello\n", b"[1]\n", b'{"a": 1}\n', b"no line", b"\xff\n"])
def test_other_files_are_left_alone(tmp_path, content):
    path = tmp_path / "catch.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is no file of hauls"):
        open_file(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("row", ['{"fish": "pike"}', "[]", "pike", ""])
def test_lines_that_are_no_records_are_refused(tmp_path, row):
    path = tmp_path / "catch.jsonl"
    open_file(path).add([PIKE])
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{row}\n")
    with pytest.raises(ConfigError, match=r"catch\.jsonl:3 is no haul: "):
        open_file(path)


def test_fields_that_are_not_the_records_are_passed_over(tmp_path):
    path = tmp_path / "catch.jsonl"
    open_file(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"fish": "eel", "weights": [], "bait": "worm"}) + "\n")
    assert open_file(path).records == [EEL]


def test_a_path_that_cannot_be_a_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read and written: Is a directory"):
        open_file(tmp_path)
