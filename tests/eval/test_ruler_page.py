"""The page of a study: what it shows, and that answers cannot break it."""

import re
from html.parser import HTMLParser

import pytest
from ruler_answers import NOTHING_SHARED, SPARSE, full, small_study, sparse

from nanovllm.eval.ruler.page import Scale, excerpt, render_page
from nanovllm.eval.ruler.statistics import Estimate
from nanovllm.eval.ruler.summary import summarise

MINUS = "\N{MINUS SIGN}"
HOSTILE = (
    "</bdi><script>alert('x')</script><img src=x onerror=\"y\">&amp;\0\x1b[31m\x9b\ud800\u202e"
)


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what the page holds."""

    VOID = ("meta", "wbr")
    INLINE = ("wbr", "a", "bdi", "i", "span", "strong")

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], ""
        self.feed(html)
        self.close()
        self.text = re.sub(r"\s+", " ", self.text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.text += "" if tag in self.INLINE else " "
        assert not any(name.startswith("on") or name == "src" for name in attrs)
        self.tags.append(tag)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs["href"]] if "href" in attrs else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def page_of(study, command="python tests/test_ruler.py", settings=None):
    html = render_page(study, command=command, settings=settings or {"model": "demo"})
    html.encode("utf-8")
    return html, Page(html)


def test_page_says_what_was_run():
    settings = {"model": "demo", "seed": 0, "data_dir": None, "enable_offload": False}
    _, page = page_of(small_study(), "python tests/test_ruler.py --compare FULL X", settings)
    assert "python tests/test_ruler.py --compare FULL X" in page.text
    assert "model demo seed 0 enable_offload False" in page.text
    assert "data_dir" not in page.text
    assert "FULL 6 prompts" in page.text
    assert f"{SPARSE} 6 prompts" in page.text


def test_page_needs_nothing_from_elsewhere():
    html, page = page_of(small_study())
    assert not re.search(r"https?:|//|url\(|@import", html)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.links == ["#pair-1"]
    assert page.ids == ["pair-1"]


def test_page_shows_the_figures_and_what_differs():
    _, page = page_of(small_study())
    assert "1024 tokens" in page.text
    assert (
        f"vt 1024 4 0.625 0.219 to 0.908 0.500 0.150 to 0.850 ▼ {MINUS}12.5 {MINUS}56.9 to +40.2"
        in page.text
    )
    assert "1 loss vt at 1024, prompt 1: 1.000 → 0.000 wanted ABCDE" in page.text
    assert "1 win vt at 1024, prompt 2: 0.500 → 1.000 wanted ABCDE" in page.text
    assert "base it is “ABCDE” this it is ABCDX" in page.text


def test_page_marks_what_is_large_unlikely_vague_or_worthless():
    worse = {"FULL": full([1] * 50), SPARSE: sparse([0] * 6 + [1] * 44)}
    _, page = page_of(summarise(worse))
    assert f"▼ {MINUS}12.0" in page.text
    assert "0.031 *" in page.text
    assert (
        "Pale bars (1 of 1): too few prompts to tell the difference to within ±2 points"
        in page.text
    )
    assert "†" not in page.text

    _, page = page_of(summarise({"FULL": full([1] * 999), SPARSE: sparse([1] * 999)}))
    assert not re.search("▼ .[0-9]|▲ [+]|Pale|†", page.text)

    _, page = page_of(summarise({"FULL": full([0] * 999), SPARSE: sparse([0] * 960 + [1] * 39)}))
    assert "▲ +3.9 †" in page.text
    assert "† FULL itself scores below 0.1: the model cannot do this" in page.text


def test_page_shows_hostile_texts_as_they_are():
    base = full([1], answer=HOSTILE, outputs=[HOSTILE])
    study = summarise({"FULL": base, SPARSE: sparse([0], answer=HOSTILE)})
    html, page = page_of(study, command=HOSTILE, settings={HOSTILE: HOSTILE})
    shown = HOSTILE.replace("\0", "␀").replace("\x1b", "␛").replace("\x9b", "\ufffd")
    assert page.text.count(shown.replace("\ud800", "\ufffd")) == 6
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", html)
    assert "script" not in page.tags


def test_long_texts_are_cut():
    assert excerpt("a" * 300) == "a" * 300
    assert excerpt("a" * 301) == "a" * 300 + "…"


def test_page_of_one_policy_compares_nothing():
    _, page = page_of(summarise({"FULL": full([1, 0])}))
    assert "FULL 2 prompts" in page.text
    assert not re.search("wins|losses|against|points", page.text)


def test_overview_has_a_table_for_each_length_and_one_for_all():
    lengths = [{"length": 1024}, {"length": 2048}]
    study = summarise(
        {
            "FULL": [answer for length in lengths for answer in full([1, 1], **length)],
            SPARSE: sparse([1, 0], **lengths[1]),
        }
    )
    _, page = page_of(study)
    overview = page.text.split("By task")[0]
    assert re.findall(r"([\d-]+) tokens", overview) == ["1024", "2048", "1024-2048"]
    assert overview.count("no prompt here that both answered") == 1
    assert overview.count(f"▼ {MINUS}50.0") == 2


def test_bars_hold_all_intervals():
    scale = Scale.over([Estimate(-0.01, -0.12, 0.02), Estimate(0, -0.05, 0.05)])
    assert scale.limit == pytest.approx(0.15)
    assert [scale.percent(d) for d in (-0.15, 0, 0.075)] == ["0.00%", "50.00%", "75.00%"]
    assert Scale.over([]).limit == 0.05
    assert Scale.over([Estimate(0, -1, 1)]).limit == 1


@pytest.mark.parametrize("answers", NOTHING_SHARED)
def test_page_tells_that_no_prompt_was_answered_by_both(answers):
    _, page = page_of(summarise(answers))
    assert "No prompt that both answered." in page.text
