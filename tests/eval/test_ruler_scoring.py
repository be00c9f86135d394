"""Scores, against cases made by hand."""

import pytest

from nanovllm.eval.ruler import score

FOUR = ["1111111", "2222222", "3333333", "4444444"]


# C59


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("It is 4812973.", ["4812973"], 1),
        ("", ["4812973"], 0),
        ("The number is 4812974.", ["4812973"], 0),
        ("\x00 48\x0012\x1f973\x7f", ["4812973"], 1),
        ("481\n2973", ["4812973"], 0),
        ("amber\nfalcon", ["amber falcon"], 1),
        ("AMBER-FALCON", ["amber-falcon"], 1),
        ("amber-falcon", ["Amber-Falcon"], 1),
        ("It is 00481297300.", ["4812973"], 1),
        ("1111111, 3333333 and 9999999", FOUR, 0.5),
        (" ".join(FOUR), FOUR, 1),
        ("3333333", FOUR, 0.25),
        ("4812973", "4812973", 1),
        ("4, 8, 1", "4812973", 0),
        ("", "4812973", 0),
    ],
)
def test_share_of_references_that_stand_in_the_answer(answer, references, expected):
    assert score(answer, references) == expected


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("in Vienna, I think", ["Vienna", "Wien", "the capital of Austria"], 1),
        ("Graz", ["Vienna", "Wien"], 0),
        ("", ["Vienna"], 0),
        ("vienna", "Vienna", 1),
    ],
)
def test_any_reference_will_do_for_questions(answer, references, expected):
    assert score(answer, references, "part") == expected
