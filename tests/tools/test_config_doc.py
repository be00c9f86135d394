"""docs/config.md is what the source says."""

import subprocess
import sys

import pytest

from nanovllm.errors import ConfigError
from nanovllm.tools import config_doc
from nanovllm.tools.config_doc import DOC_PATH, is_current, read_fields, render

SOURCE = '''
Color = Literal["red", "dark | blue"]

class Options:
    """What it holds."""

    color: Color = "red"
    """Its
    color."""
    size: int | None
    """Its size."""
    TABLE = {}

    def method(self): ...
'''


def test_doc_is_current():
    assert is_current(DOC_PATH), "run python -m nanovllm.tools.config_doc"


def test_changed_text_is_detected(tmp_path):
    """Control: one word less is stale, and so is no file."""
    copy = tmp_path / "config.md"
    assert not is_current(copy)
    copy.write_text(render(), encoding="utf-8")
    assert is_current(copy)
    copy.write_text(render().replace("greedy", "", 1), encoding="utf-8")
    assert not is_current(copy)


@pytest.mark.parametrize(
    ("old", "new"), [('"red"\n', '"blue"\n'), ("Its size", "Its length"), ("size:", "length:")]
)
def test_changed_field_is_detected(old, new):
    """Control: default, docstring and name each show in what is read."""
    assert old in SOURCE
    assert read_fields(SOURCE, "Options") != read_fields(SOURCE.replace(old, new), "Options")


def test_fields():
    text, (color, size) = read_fields(SOURCE, "Options")
    assert text == "What it holds."
    assert (color.name, color.default, color.text) == ("color", '`"red"`', "Its color.")
    assert color.type == '`"red"` or `"dark | blue"`'
    assert (size.name, size.default, size.type) == ("size", "", "`int` or `None`")


def test_a_type_from_another_module():
    """What the module assigns there; a name of another package is left as it is."""
    source = '''
from pathlib import Path
from nanovllm.kvcache.page_budget import PageBudget, PageEstimator

class Options:
    a: PageEstimator
    """One."""
    b: Path | PageBudget
    """Two."""
'''
    _, fields = read_fields(source, "Options")
    assert [field.type for field in fields] == ['`"codes"` or `"bounds"`', "`Path` or `PageBudget`"]


@pytest.mark.parametrize(
    ("source", "named"),
    [(SOURCE.replace('"""Its size."""', ""), "Options.size"), ("", "class Options")],
)
def test_what_is_missing_is_named(source, named):
    with pytest.raises(ConfigError, match=named):
        read_fields(source, "Options")


def test_command_line(tmp_path, monkeypatch, capsys):
    """`--check` fails on a stale file and leaves it; a plain run mends it."""
    doc = tmp_path / "config.md"
    doc.write_text("stale")
    monkeypatch.setattr(config_doc, "DOC_PATH", doc)
    monkeypatch.setattr(sys, "argv", ["config_doc", "--check"])
    with pytest.raises(SystemExit) as failed:
        config_doc.main()
    assert failed.value.code == 1
    assert "stale" in capsys.readouterr().err
    assert doc.read_text() == "stale"
    monkeypatch.setattr(sys, "argv", ["config_doc"])
    config_doc.main()
    monkeypatch.setattr(sys, "argv", ["config_doc", "--check"])
    config_doc.main()
    assert doc.read_text(encoding="utf-8") == render()


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "nanovllm.tools.config_doc", "--check"])
    assert done.returncode == 0
