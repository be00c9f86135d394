"""Figures of hand-made answers are those that one works out by hand."""

import math

import pytest
from ruler_answers import NOTHING_SHARED, SPARSE, full, small_study, sparse

from nanovllm import ConfigError
from nanovllm.eval.ruler.summary import match, summarise


def test_figures_of_a_policy():
    (base, _), study = small_study().policies, small_study()
    vt, cwe, both = base.figures.rows
    assert (vt.task, vt.lengths, vt.num_prompts) == ("vt", (1024, 1024), 4)
    assert (vt.score.value, vt.passed, vt.tile_density, vt.ttft_ms) == (0.625, 0.75, 1, 10)
    assert (cwe.score.value, cwe.passed) == (0, 0)
    assert (both.task, both.num_prompts, both.passed) == (None, 6, 0.5)
    assert both.score.value == pytest.approx(2.5 / 6)
    assert both == base.figures.total
    assert study.lengths == [1024]


def test_figures_of_a_pair():
    (comparison,) = small_study().comparisons
    vt, cwe, both = comparison.figures.rows
    assert (vt.base.value, vt.other.value, vt.difference.value) == (0.625, 0.5, -0.125)
    # Gains 0, -1, 1/2 and 0: their squares with one more are 9/4.
    half = 1.959964 * math.sqrt(9 / 4 - 1 / 4 / 6) / 6
    assert vt.difference.low == pytest.approx(-0.5 / 6 - half)
    assert vt.difference.high == pytest.approx(-0.5 / 6 + half)
    assert (vt.wins, vt.losses, vt.p_value) == (1, 1, 1)
    assert (vt.tile_density, vt.base_ttft_ms, vt.ttft_ms, vt.ttft_ratio) == (0.25, 10, 25, 2.5)
    assert (cwe.wins, cwe.losses, cwe.difference.value) == (0, 0, 0)
    assert (both.task, both.num_prompts, both.wins, both.losses) == (None, 6, 1, 1)
    assert both.difference.value == pytest.approx(-0.5 / 6)
    assert both.tile_density == pytest.approx((4 * 0.25 + 2 * 0.5) / 6)
    assert [pair.gain for pair in comparison.pairs] == [0, -1, 0.5, 0, 0, 0]


def test_a_first_prompt_that_waits_for_compilers_tells_nothing_of_the_others():
    slow_first = full([1], ttft_ms=4000.0) + full([1, 1], length=2048)
    pair = summarise({"FULL": slow_first, SPARSE: sparse([1]) + sparse([1, 1], length=2048)})
    assert pair.policies[0].figures.total.ttft_ms == 10
    assert pair.comparisons[0].figures.total.ttft_ratio == 2.5


def pair_of(base, other):
    return summarise({"FULL": full(base), SPARSE: sparse(other)}).comparisons[0].figures.total


def test_marks_of_a_pair():
    small = pair_of([1] * 50, [0] + [1] * 49)
    assert small.difference.value == pytest.approx(-0.02)
    assert not small.is_large
    assert not small.is_significant
    assert small.is_vague
    large = pair_of([1] * 50, [0] * 6 + [1] * 44)
    assert large.is_large
    assert large.is_significant
    assert not large.base_is_unable
    assert not pair_of([1] * 1000, [1] * 1000).is_vague
    assert pair_of([1] + [0] * 19, [0] * 20).base_is_unable
    assert not pair_of([1] * 2 + [0] * 18, [0] * 20).base_is_unable


def rows_of(study):
    return [(row.task, *row.lengths) for row in study.policies[0].figures.rows]


def test_totals_stand_where_they_are_of_several():
    two, four = {"length": 2048}, {"length": 4096}
    assert rows_of(summarise({"FULL": full([1])})) == [("vt", 1024, 1024)]
    one_task = full([1], **four) + full([1], **two)
    assert rows_of(summarise({"FULL": one_task})) == [
        ("vt", 2048, 2048),
        ("vt", 4096, 4096),
        ("vt", 2048, 4096),
    ]
    two_tasks = [*one_task, *full([1], task="cwe", **two)]
    assert rows_of(summarise({"FULL": two_tasks})) == [
        ("vt", 2048, 2048),
        ("cwe", 2048, 2048),
        (None, 2048, 2048),
        ("vt", 4096, 4096),
        (None, 2048, 4096),
    ]


def test_tasks_with_lengths_of_their_own_are_one_section():
    """As files have them: the longest prompt of each task."""
    study = summarise({"FULL": full([1], length=4090) + full([0], length=4096, task="cwe")})
    assert study.lengths == [None]
    assert rows_of(study) == [("vt", 4090, 4090), ("cwe", 4096, 4096), (None, 4090, 4096)]


def test_pairs_are_of_the_samples_that_both_answered():
    base = full([1, 1, 0.5, 0, 1]) + full([1], task="cwe")
    study = summarise({"FULL": base, SPARSE: sparse([1, 0.5, 1, 0])[::-1]})
    (pair,) = study.comparisons[0].figures.rows
    assert (pair.num_prompts, pair.base.value, pair.other.value) == (4, 0.625, 0.625)
    assert (pair.wins, pair.losses, pair.p_value) == (1, 1, 1)


def test_pairs_of_different_prompts_are_refused():
    with pytest.raises(
        ConfigError, match=r"vt at length 1024, sample 1: FULL and XATTN_\S+ answered different"
    ):
        match(full([1, 1]), [sparse([1])[0], *sparse([1, 1], prompt="other")[1:]])


@pytest.mark.parametrize("answers", NOTHING_SHARED)
def test_policies_without_answers_in_common_have_no_figures(answers):
    (comparison,) = summarise(answers).comparisons
    assert comparison.pairs == ()
    assert comparison.figures.total is None
    assert comparison.figures.rows == []
