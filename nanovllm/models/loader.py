"""Makes a model and fills it from safetensors, every parameter from the one file that owns it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm

from nanovllm.device import Device
from nanovllm.errors import CapacityError, ConfigError
from nanovllm.layers.linear import Linear
from nanovllm.log import get_logger
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.registry import model_class

logger = get_logger(__name__)

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_model(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    dummy_seed: int | None = None,
) -> LlamaForCausalLM:
    """Make the model that `config` describes, with the directory's weights, on `device`.

    Args:
        directory: Hugging Face directory with one or many safetensors files. Pickles are not read.
        config: its configuration.
        dtype: type to convert the weights to.
        device: where to put them.
        dummy_seed: draw random weights from this seed instead of reading any.

    Raises:
        ConfigError: a file or tensor is missing, damaged or of the wrong shape; with its name.
        CapacityError: the weights do not fit in the memory that is free.
    """
    with torch.device("meta"):
        model = model_class(config.architecture)(config)
    needed = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    free = device.free_memory_bytes()
    if needed > free:
        raise CapacityError(
            f"the weights need {needed / 2**30:.1f} GiB in {dtype}, and {free / 2**30:.1f} GiB are "
            f"free on {device.name}"
        )
    model = model.to(dtype).to_empty(device=device.torch_device)
    if dummy_seed is not None:
        _draw_weights(model, config, dummy_seed)
    else:
        with WeightFiles(directory) as files:
            _read_weights(model, config, files)
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()
    return model.eval()


class WeightFiles:
    """The tensors of a model directory, each name assigned to the one file it is read from."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open_files: dict[str, safe_open] = {}
        self._file_of = self._assign()

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open_files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._file_of)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read one tensor of plain numbers, of the shape that the config implies."""
        file = self._file_of[name]
        try:
            tensor: torch.Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(
                f"{self._directory / file}: tensor {name!r} cannot be read: {error}"
            ) from error
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{self._directory / file}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                f"but config.json implies {shape}"
            )
        if tensor.dtype not in _DTYPES:
            raise ConfigError(
                f"{self._directory / file}: tensor {name!r} is of {tensor.dtype}: quantised "
                "checkpoints are not supported"
            )
        return tensor

    def _assign(self) -> dict[str, str]:
        index = self._directory / _INDEX
        if index.is_file():
            weight_map = _read_index(index)
            self._refuse_missing(sorted(set(weight_map.values())))
            return weight_map
        file_of: dict[str, str] = {}
        for file in self._unindexed():
            for name in self._open(file).keys():  # noqa: SIM118
                if name in file_of:
                    raise ConfigError(
                        f"{self._directory} has no {_INDEX} to say whether {name!r} is that of "
                        f"{file_of[name]} or {file}"
                    )
                file_of[name] = file
        return file_of

    def _unindexed(self) -> list[str]:
        found = sorted(path.name for path in self._directory.glob("*.safetensors"))
        if "model.safetensors" in found:
            return ["model.safetensors"]
        totals = {match[2] for name in found if (match := _SHARD.fullmatch(name))}
        if len(totals) == 1:
            (total,) = totals
            expected = [f"model-{i:05d}-of-{total}.safetensors" for i in range(1, int(total) + 1)]
            self._refuse_missing(expected)
            return expected
        if len(found) == 1:
            return found
        if found:
            raise ConfigError(
                f"{self._directory} has no {_INDEX} and no model.safetensors to say which of "
                f"{', '.join(found)} hold the weights"
            )
        others = [
            path.name
            for suffix in ("bin", "pt", "pth")
            for path in sorted(self._directory.glob(f"*.{suffix}"))
        ]
        hint = (
            f" {', '.join(others)} are pickles, which can run code and are never opened: convert "
            "them to safetensors."
            if others
            else ' To benchmark without weights use load_format="dummy".'
        )
        raise ConfigError(f"{self._directory} holds no *.safetensors file.{hint}")

    def _refuse_missing(self, names: list[str]) -> None:
        missing = [name for name in names if not (self._directory / name).is_file()]
        if missing:
            raise ConfigError(f"{self._directory} lacks the weight files {', '.join(missing)}")

    def _open(self, file: str) -> safe_open:
        if file not in self._open_files:
            self._open_files[file] = _open_safetensors(self._directory / file)
        return self._open_files[file]


def _open_safetensors(path: Path) -> safe_open:
    try:
        with path.open("rb") as stream:
            is_pointer = stream.read(15) == b"version https:/"
        if not is_pointer:
            return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or cut short ({error}): download it again") from error
    raise ConfigError(f"{path} is a git-lfs pointer, not the weights: run `git lfs pull` there")


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a valid index: {error!r}") from error
    if not (
        isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    ):
        raise ConfigError(f"{path} is not a valid index: its weight_map maps no names to files")
    return weight_map


def _checkpoint_name(module_name: str) -> str:
    return module_name if module_name == "lm_head" else f"model.{module_name}"


def _sources(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[tuple[str, int]]]]:
    """Yield each parameter with the tensors that are its rows: checkpoint name and row count."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Linear):
                parent = module_name.rpartition(".")[0]
                prefix = f"{parent}." if parent else ""
                parts = [
                    (f"{_checkpoint_name(prefix + part)}.{name}", rows)
                    for part, rows in module.parts.items()
                ]
            else:
                parts = [(f"{_checkpoint_name(module_name)}.{name}", parameter.shape[0])]
            yield parameter, parts


def _read_weights(model: LlamaForCausalLM, config: ModelConfig, files: WeightFiles) -> None:
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    aliases: dict[str, str] = {}
    tied = config.tie_word_embeddings
    if tied and head in files:
        if embed not in files:
            aliases[embed] = head
        elif _differ(files, config, embed, head):
            logger.warning(
                "config.json ties the output head to the embedding, but the checkpoint holds "
                "another %s: using it",
                head,
            )
            tied = False
    if tied:
        model.lm_head.weight = model.embed_tokens.weight
    sources = [(p, parts) for p, parts in _sources(model) if not (tied and parts[0][0] == head)]
    names = [aliases.get(name, name) for _, parts in sources for name, _ in parts]
    missing = sorted({name for name in names if name not in files})
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        raise ConfigError(f"the checkpoint lacks tensors that config.json implies: {shown}")
    if unused := sorted(files.names() - set(names) - {embed, head}):
        logger.warning("%d tensors of the checkpoint are not used: %s", len(unused), unused[:5])
    for parameter, parts in tqdm(sources, desc="Loading weights", leave=False, disable=None):
        start = 0
        for name, rows in parts:
            shape = (rows, *parameter.shape[1:])
            parameter[start : start + rows] = files.read(aliases.get(name, name), shape)
            start += rows


def _differ(files: WeightFiles, config: ModelConfig, *names: str) -> bool:
    a, b = (files.read(name, (config.vocab_size, config.hidden_size)) for name in names)
    return not torch.equal(a, b)


def _draw_weights(model: LlamaForCausalLM, config: ModelConfig, seed: int) -> None:
    """Fill with what training starts from: small normal weights, zero biases, unit norms."""
    generator = torch.Generator(device=model.norm.weight.device).manual_seed(seed)
    std = float(getattr(config.hf, "initializer_range", 0.02))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, std, generator=generator)
