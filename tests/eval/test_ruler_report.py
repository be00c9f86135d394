"""Tables hold the figures of a study, in text and in Markdown."""

import re

import pytest
from ruler_answers import NOTHING_SHARED, SPARSE, full, small_study, sparse

from nanovllm.eval.ruler.report import as_markdown, as_text
from nanovllm.eval.ruler.summary import summarise


def test_text_tables():
    assert as_text(small_study()).splitlines() == [
        "FULL",
        "task  length  n           score [95%]  passed  density  TTFT ms",
        "vt      1024  4  0.625 [0.219, 0.908]     75%    1.000       10",
        "cwe     1024  2  0.000 [0.000, 0.658]      0%    1.000       10",
        "all     1024  6  0.417 [0.139, 0.759]     50%    1.000       10",
        "",
        SPARSE,
        "task  length  n           score [95%]  passed  density  TTFT ms",
        "vt      1024  4  0.500 [0.150, 0.850]     50%    0.250       25",
        "cwe     1024  2  0.000 [0.000, 0.658]      0%    0.500       25",
        "all     1024  6  0.333 [0.097, 0.700]     33%    0.333       25",
        "",
        f"{SPARSE} against FULL",
        "task  length  n            base [95%]            this [95%]         difference [95%]"
        "  wins  losses      p  density  TTFT x",
        "vt      1024  4  0.625 [0.219, 0.908]  0.500 [0.150, 0.850]  -0.125 [-0.569, +0.402]"
        "     1       1  1.000    0.250    2.50",
        "cwe     1024  2  0.000 [0.000, 0.658]  0.000 [0.000, 0.658]  +0.000 [-0.490, +0.490]"
        "     0       0  1.000    0.500    2.50",
        "all     1024  6  0.417 [0.139, 0.759]  0.333 [0.097, 0.700]  -0.083 [-0.427, +0.302]"
        "     1       1  1.000    0.333    2.50",
    ]


def test_markdown_holds_the_same_cells():
    study = small_study()
    sections = [part.splitlines() for part in as_markdown(study).split("## ")[1:]]
    assert [lines[0] for lines in sections] == [
        "`FULL`",
        f"`{SPARSE}`",
        f"`{SPARSE}` against `FULL`",
    ]
    for lines, text in zip(sections, as_text(study).split("\n\n"), strict=True):
        rows = [line for line in lines if line.startswith("|")]
        cells = [re.findall(r"(?<=\| )[^|]+(?= \|)", row) for row in rows]
        assert len({len(row) for row in cells}) == 1
        assert set(cells.pop(1)) == {":--", "--:"}
        expected = [re.split(r"  +", line) for line in text.splitlines()[1:]]
        assert cells == expected


def test_no_p_value_reads_as_zero():
    study = summarise({"FULL": full([1] * 12), SPARSE: sparse([0] * 12)})
    assert "  <0.001  " in as_text(study)


@pytest.mark.parametrize("answers", NOTHING_SHARED)
def test_tables_without_rows_have_their_header(answers):
    study = summarise(answers)
    assert as_text(study).split("\n\n")[2].startswith(f"{SPARSE} against FULL\ntask  length  n")
    assert as_markdown(study).count("| task | length | n |") == 3
