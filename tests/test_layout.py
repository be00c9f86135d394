"""Rules about the source text that import-linter cannot state."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "nanovllm"
MAX_LINES = 400

# What may be written where: a pattern, and the files and folders of the package that it is for.
PLACES = {
    "torch.cuda": (re.compile(r"\btorch\.cuda\b|from torch import .*\bcuda\b"), ["device"]),
    "flash_attn": (
        re.compile(r"^\s*(?:import|from)\s+flash_attn\b"),
        ["ops/backends/flash_attn.py"],
    ),
}


def misplaced(root: Path, pattern: re.Pattern[str], allowed: list[str]) -> list[str]:
    """Return `file:line` of each match in Python files under `root` but outside `allowed`."""
    return [
        f"{path.relative_to(root)}:{number}"
        for path in sorted(root.rglob("*.py"))
        if not any(path.is_relative_to(root / place) for place in allowed)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def too_long(root: Path) -> list[str]:
    """Return the Python files under `root` that have `MAX_LINES` lines or more."""
    return [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        if len(path.read_text(encoding="utf-8").splitlines()) >= MAX_LINES
    ]


@pytest.mark.parametrize("name", PLACES)
def test_only_in_its_place(name):
    pattern, allowed = PLACES[name]
    assert misplaced(PACKAGE, pattern, allowed) == []


@pytest.mark.parametrize("name", PLACES)
def test_its_place_has_it(name):
    """The rule still means something: what it is about is written where it may be."""
    pattern, allowed = PLACES[name]
    assert misplaced(PACKAGE, pattern, []) != []
    assert all((PACKAGE / place).exists() for place in allowed)


def test_files_are_short():
    assert too_long(PACKAGE) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("torch.cuda", "torch.cuda.synchronize()"),
        ("torch.cuda", "import torch.cuda"),
        ("torch.cuda", "from torch import cuda"),
        ("flash_attn", "import flash_attn"),
        ("flash_attn", "    from flash_attn.cute import interface"),
    ],
)
def test_misplaced_line_is_found(tmp_path, name, line):
    """Control: the same line in another file, and in a folder of like name, is reported."""
    pattern, allowed = PLACES[name]
    for place in [*allowed, "engine/sampler.py", "devices/cuda.py"]:
        path = tmp_path / place if place.endswith(".py") else tmp_path / place / "cuda.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = 1\n{line}\n")
    assert misplaced(tmp_path, pattern, allowed) == ["devices/cuda.py:2", "engine/sampler.py:2"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("torch.cuda", "torch_cuda = x.is_cuda"),
        ("flash_attn", "from nanovllm.ops.backends.flash_attn import FlashAttention4"),
        ("flash_attn", "from nanovllm.ops.attention import flash_attn_with_lse"),
    ],
)
def test_other_lines_are_not(tmp_path, name, line):
    (tmp_path / "sampler.py").write_text(line)
    assert misplaced(tmp_path, *PLACES[name]) == []


def test_long_file_is_found(tmp_path):
    """Control."""
    (tmp_path / "short.py").write_text("x = 1\n" * (MAX_LINES - 1))
    (tmp_path / "long.py").write_text("x = 1\n" * MAX_LINES)
    assert too_long(tmp_path) == ["long.py"]
