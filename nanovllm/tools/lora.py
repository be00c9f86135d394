"""Merge a LoRA adapter, as PEFT saves it, into a Hugging Face state dict."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_KEY_PREFIX = "base_model.model."
_Value = TypeVar("_Value", int, float)
_A, _B = ".lora_A.weight", ".lora_B.weight"

# Whatever these say, the merged weights are the same. (PEFT ignores `fan_in_fan_out` on
# `nn.Linear`, and the models that nanovllm runs have no other kind of linear layer.)
_IRRELEVANT_KEYS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "fan_in_fan_out",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
_REQUIRED_KEYS = ("peft_type", "r", "lora_alpha", "target_modules")
# The other initialisations (PiSSA, OLoRA, LoftQ, ...) also change the base weights, on loading too.
_INITS_OF_ADAPTER_ONLY = (True, False, "gaussian", "orthogonal")


def merge_adapter(state_dict: Mapping[str, Tensor], adapter_dir: str | Path) -> dict[str, Tensor]:
    """Return the weights that PEFT's `merge_and_unload()` would leave in the model, to rounding.

    Every adapted weight becomes `W + scale * B @ A`, computed in fp32 and rounded once to W's
    dtype, with `scale = alpha / r`, or `alpha / sqrt(r)` under `use_rslora`; `rank_pattern` and
    `alpha_pattern` give some modules their own r and alpha. `modules_to_save` replace the base's.

    Args:
        state_dict: weights of the base model by Hugging Face name, linear ones as `nn.Linear` keeps
            them, `[out_features, in_features]`. Not changed; the result shares the tensors that the
            adapter leaves alone.
        adapter_dir: folder of `adapter_config.json` and `adapter_model.safetensors` (any float
            dtype). A pickled `adapter_model.bin` is never read.

    Raises:
        ConfigError: the config asks for something that is not implemented (DoRA, biases, adapted
            embeddings, ...), or a tensor of the adapter is unknown, has no partner, the wrong shape
            or no counterpart in the base. The message names the key.

    Source: LoRA, arXiv 2106.09685 section 4.1; rsLoRA, arXiv 2312.03732; PEFT's checkpoint format.
    """
    folder = Path(adapter_dir)
    config = _LoraConfig.load(folder / "adapter_config.json")
    adapter = _load_tensors(folder / "adapter_model.safetensors")
    merged = dict(state_dict)

    config.check_replacements_complete(base=merged, adapter=adapter)
    for name in [name for name in adapter if config.replaces(name)]:
        merged[name] = adapter.pop(name).to(_base_weight(merged, name).dtype)

    for module in [name.removesuffix(_A) for name in adapter if name.endswith(_A)]:
        weight = _base_weight(merged, f"{module}.weight")
        delta = _low_rank_delta(module, adapter, config)
        _check_shape(f"{module}.weight", tuple(delta.shape), tuple(weight.shape))
        merged[f"{module}.weight"] = (weight.float() + delta).to(weight.dtype)

    if adapter:
        raise ConfigError(f"adapter tensor {min(adapter)!r} is of a kind that cannot be merged")
    return merged


@dataclass(frozen=True, kw_only=True)
class _LoraConfig:
    """The part of an `adapter_config.json` that decides what the merged weights are."""

    r: int
    lora_alpha: float
    target_modules: str | list[str]
    use_rslora: bool = False
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    exclude_modules: str | list[str]
    modules_to_save: list[str]

    @classmethod
    def load(cls, path: Path) -> _LoraConfig:
        """Read and check the file; a key that is not understood must be null, false or empty."""
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the LoRA config {path}: {error}") from error
        for key in _REQUIRED_KEYS:
            if raw.get(key) is None:
                raise ConfigError(f"{path}: key {key!r} is missing")
        _check_value("peft_type", raw.pop("peft_type"), ("LORA",))
        _check_value("bias", raw.pop("bias", "none"), ("none",))
        _check_value(
            "init_lora_weights", raw.pop("init_lora_weights", True), _INITS_OF_ADAPTER_ONLY
        )
        config = cls(
            r=raw.pop("r"),
            lora_alpha=raw.pop("lora_alpha"),
            target_modules=raw.pop("target_modules"),
            use_rslora=raw.pop("use_rslora", False),
            rank_pattern=raw.pop("rank_pattern", None) or {},
            alpha_pattern=raw.pop("alpha_pattern", None) or {},
            exclude_modules=raw.pop("exclude_modules", None) or [],
            modules_to_save=raw.pop("modules_to_save", None) or [],
        )
        for key in raw.keys() - _IRRELEVANT_KEYS:
            if raw[key]:
                raise ConfigError(f"LoRA config key {key!r} = {raw[key]!r} is not supported")
        return config

    def adapts(self, module: str) -> bool:
        """Whether the config, and not just the tensor file, says that `module` has a LoRA."""
        everything = self.target_modules == "all-linear"
        return (everything or _names(self.target_modules, module)) and not _names(
            self.exclude_modules, module
        )

    def replaces(self, parameter: str) -> bool:
        """Whether `parameter` lies in one of `modules_to_save`; PEFT matches ends of names."""
        modules = accumulate(parameter.split(".")[:-1], "{}.{}".format)
        return any(module.endswith(tuple(self.modules_to_save)) for module in modules)

    def rank(self, module: str) -> int:
        """Rank of the LoRA of one module."""
        return _first_match(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Factor of `B @ A` for one module."""
        rank = self.rank(module)
        alpha = _first_match(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def check_replacements_complete(
        self, *, base: Mapping[str, Tensor], adapter: Mapping[str, Tensor]
    ) -> None:
        """Raise ConfigError unless the adapter holds exactly the parameters it must replace."""
        for parameter in filter(self.replaces, base):
            if parameter not in adapter:
                raise ConfigError(f"'modules_to_save' covers {parameter!r}: not in the adapter")
        for parameter in filter(self.replaces, adapter):
            weight = _base_weight(base, parameter)
            _check_shape(parameter, tuple(adapter[parameter].shape), tuple(weight.shape))
            if parameter.endswith("embed_tokens.weight") and "lm_head.weight" not in base:
                raise ConfigError(f"'modules_to_save' would untie the head from {parameter!r}")


def _low_rank_delta(module: str, adapter: dict[str, Tensor], config: _LoraConfig) -> Tensor:
    """Take the A and B of `module` out of `adapter` and return `scale * B @ A` in fp32."""
    if module + _B not in adapter:
        raise ConfigError(f"adapter tensor {module + _B!r} is missing beside its lora_A")
    if not config.adapts(module):
        raise ConfigError(f"adapter tensor {module + _A!r}: 'target_modules' leaves its module out")
    a = adapter.pop(module + _A).float()  # [rank, in_features]
    b = adapter.pop(module + _B).float()  # [out_features, rank]
    rank = config.rank(module)
    _check_shape(module + _A, tuple(a.shape), (rank, *a.shape[1:]))
    _check_shape(module + _B, tuple(b.shape), (*b.shape[:1], rank))
    return config.scale(module) * (b @ a)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of the adapter by the name of the base's module that they belong to."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot read the LoRA weights {path}: {error}. Only safetensors are read; convert a "
            "pickled adapter_model.bin first."
        ) from error
    for name in tensors:
        if not name.startswith(_KEY_PREFIX):
            raise ConfigError(f"adapter tensor {name!r} does not begin with {_KEY_PREFIX!r}")
    return {name.removeprefix(_KEY_PREFIX): tensor for name, tensor in tensors.items()}


def _base_weight(base: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in base:
        raise ConfigError(f"the adapter changes {name!r}, which the base model does not have")
    return base[name]


def _check_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if got != expected:
        raise ConfigError(f"adapter for {name!r} has shape {got}, expected {expected}")


def _check_value(key: str, got: object, allowed: Iterable[object]) -> None:
    if got not in allowed:
        raise ConfigError(f"LoRA config key {key!r} = {got!r} is not supported, only {allowed}")


def _names(spec: str | list[str], module: str) -> bool:
    """PEFT's rule for modules: a string is a regex of the whole name, a list holds suffixes."""
    if isinstance(spec, str):
        return re.fullmatch(spec, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in spec)


def _first_match(patterns: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    """PEFT's rule for patterns: the first key that matches the name from a dot, or all of it."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
