"""What every test runs under: no network, few threads, Triton interpreted where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# So that assertions in what tests share say which values they saw.
pytest.register_assert_rewrite("tiny_models", "chat_turns")

HAS_CUDA = torch.cuda.is_available()

# Read when a kernel's module, and when huggingface_hub, is imported: so before any test module is.
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

# An example may be slow on a busy machine; whether it is right does not depend on that.
settings.register_profile("nanovllm", deadline=None)
settings.load_profile("nanovllm")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest first, so that no worker is left with one of them at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if item.get_closest_marker("gpu"):
            # One worker has the card to itself, as far as large models go.
            item.add_marker(
                pytest.mark.xdist_group("gpu")
                if HAS_CUDA
                else pytest.mark.skip(reason="needs a CUDA device")
            )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a tiny checkpoint, once for each set of arguments.

    It takes the arguments of `tiny_models.make_model` but the directory, and returns the
    directory, which is shared: tests that change files work on a `tiny_models.copy_model`.
    """
    from tiny_models import make_model

    made: dict[str, Path] = {}

    def make(architecture: str = "LlamaForCausalLM", **options: Any) -> Path:
        key = repr((architecture, sorted(options.items())))
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp("model"), architecture, **options)
        return made[key]

    return make
