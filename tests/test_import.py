"""Importing is cheap, and nothing outside the required dependencies is needed for it."""

import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nanovllm

ROOT = Path(__file__).parents[1]
MODULES = sorted(m.name for m in pkgutil.walk_packages(nanovllm.__path__, "nanovllm."))
HEAVY = ("torch", "transformers", "triton", "tokenizers", "numpy")


def run(code):
    """Run code in a fresh interpreter and return what it prints, or fail with its traceback."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def heavy_imports_of(statement):
    return run(
        f"import sys; {statement}; print(*[name for name in {HEAVY} if name in sys.modules])"
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import nanovllm",
        "from nanovllm import SamplingParams; SamplingParams()",
        "from nanovllm import ConfigError, FULL, SparsePolicyType, RequestOutput, StreamOutput",
        "import nanovllm.config; nanovllm.config.Config(model='demo')",
    ],
)
def test_import_is_light(statement):
    assert heavy_imports_of(statement) == []


def test_engine_is_not_light():
    """Control: what the others do not import would be seen."""
    assert set(heavy_imports_of("from nanovllm import LLM")) >= {"torch", "transformers"}


def test_every_name_resolves():
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name) is not None
    assert nanovllm.FULL is nanovllm.SparsePolicyType.FULL
    assert set(nanovllm.SparsePolicyType.__members__) <= set(nanovllm.__all__)


def test_unknown_name():
    with pytest.raises(AttributeError, match="'nanovllm' has no attribute 'LLMs'"):
        nanovllm.LLMs  # noqa: B018


def extras():
    """Return the packages that only an extra brings, as they are imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    required, *optional = (
        {re.split(r"[\[=<>;! ]", line)[0].replace("-", "_") for line in group} for group in groups
    )
    return sorted(set().union(*optional) - required)


def test_every_module_imports_without_the_extras():
    """With each of the extras' packages hidden, as if it were not installed."""
    hidden = [*extras(), "flash_attn", "cutlass", "quack"]
    assert {"peft", "einops", "pytest", "flash_attn"} <= set(hidden)
    assert len(MODULES) > 50
    imported = run(
        "import importlib, os, sys\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        f"sys.modules.update(dict.fromkeys({hidden}))\n"
        f"for name in {MODULES}:\n"
        "    importlib.import_module(name)\n"
        "    print(name)\n"
    )
    assert imported == MODULES


def test_hidden_package_is_missed():
    """Control: hiding a package does make its import fail."""
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        run("import sys; sys.modules['einops'] = None; import einops")
