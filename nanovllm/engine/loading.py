"""From a model directory to a runner: device, weights, memory plan, cache, in that order."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.engine.memory_plan import plan_kv_cache
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sampler import Sampler
from nanovllm.engine.scheduler import Step
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import CapacityError, ConfigError
from nanovllm.kvcache.resident import ResidentKVCache
from nanovllm.kvcache.sparse.registry import create_policy
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.log import get_logger
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.ops.backends import resolve_backend
from nanovllm.sampling_params import SamplingParams

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner, and what its making decided."""

    runner: ModelRunner
    num_blocks: int
    """KV blocks of its cache."""
    max_model_len: int
    """Most tokens of one sequence."""
    length_reason: str
    """What bounds `max_model_len`, and how to raise it if one can."""
    dtype: torch.dtype
    backend_name: str


def load_runner(
    config: Config, directory: Path, model_config: ModelConfig, device: Device
) -> LoadedModel:
    """Load a model and make the KV cache that the memory left allows.

    Raises:
        ConfigError: an option or the checkpoint is not usable.
        BackendUnavailableError: the named attention backend cannot run here.
        CapacityError: weights, activations or one KV block do not fit.
    """
    try:
        return _load_runner(config, directory, model_config, device)
    except torch.OutOfMemoryError as error:
        free, total = device.free_memory_bytes() / 2**30, device.total_memory_bytes() / 2**30
        raise CapacityError(
            f"the model does not fit on {device.name}, where {free:.1f} of {total:.1f} GiB are "
            f"free. {error}"
        ) from error


def _load_runner(
    config: Config, directory: Path, model_config: ModelConfig, device: Device
) -> LoadedModel:
    dtype = _dtype(config, model_config, device)
    policy = create_policy(config.sparse_policy)
    backend = resolve_backend(
        config.attention_backend, device.torch_device, dtype, model_config.head_dim
    )
    rotary = RotaryEmbedding(model_config.hf, model_config.head_dim, device.torch_device)
    max_model_len, length_reason = _max_model_len(config, model_config)
    dummy_seed = config.seed if config.load_format == "dummy" else None
    model = load_model(directory, model_config, dtype, device, dummy_seed)
    block_size = config.kvcache_block_size
    layer_shape = (block_size, model_config.num_kv_heads, model_config.head_dim)

    def make_runner(num_blocks: int) -> ModelRunner:
        cache = ResidentKVCache(
            model_config.num_layers, num_blocks, *layer_shape, dtype, device.torch_device
        )
        return ModelRunner(model, rotary, cache, policy, backend, device, max_model_len)

    block_bytes = ResidentKVCache.block_bytes(model_config.num_layers, *layer_shape, dtype)
    step_bytes = _measure_largest_step(config, device, make_runner, max_model_len)
    num_blocks = plan_kv_cache(config, device, block_bytes, max_model_len, step_bytes)
    if num_blocks * block_size < max_model_len:
        logger.warning(
            "max_model_len %d is bounded to the %d tokens that the KV cache holds",
            max_model_len,
            num_blocks * block_size,
        )
        max_model_len = num_blocks * block_size
        length_reason = (
            f"the KV cache has {num_blocks} blocks of {block_size} tokens; free memory, or raise "
            "num_kvcache_blocks"
        )
    runner = make_runner(num_blocks)
    if device.records_graphs and not config.enforce_eager:
        runner.capture_graphs(min(config.max_num_seqs, num_blocks))
    return LoadedModel(runner, num_blocks, max_model_len, length_reason, dtype, backend.name)


def _measure_largest_step(
    config: Config,
    device: Device,
    make_runner: Callable[[int], ModelRunner],
    max_model_len: int,
) -> int:
    """Return the bytes that the largest step takes beside weights and cache.

    That is the last chunk of the longest prompt, whose history lies in scattered blocks and is
    gathered; then sampling with every filter. The history's blocks stand for each other.
    """
    num_tokens = min(config.max_num_batched_tokens, max_model_len)
    num_blocks = -(-num_tokens // config.kvcache_block_size)
    params = SamplingParams(top_p=0.5, repetition_penalty=1.1)
    seq = Sequence(0, [0] * max_model_len, params, None, Random(0), 0.0)
    seq.num_computed_tokens = max_model_len - num_tokens
    table_len = -(-max_model_len // config.kvcache_block_size)
    seq.block_table = [i % num_blocks for i in reversed(range(table_len))]
    many = min(config.max_num_seqs, config.max_num_batched_tokens)
    runner, sampler = make_runner(num_blocks), Sampler(device)

    def run_largest_step() -> None:
        logits = runner.run(Step(prefills=[(seq, num_tokens)]))
        sampler.sample(logits.expand(many, -1).clone(), [seq] * many)

    return device.peak_memory_bytes(run_largest_step)


def _dtype(config: Config, model_config: ModelConfig, device: Device) -> torch.dtype:
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    checkpoint = getattr(torch, model_config.dtype, None)
    if checkpoint not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"config.json: dtype {model_config.dtype!r} is not supported; pass dtype=..."
        )
    return device.default_dtype or checkpoint


def _max_model_len(config: Config, model_config: ModelConfig) -> tuple[int, str]:
    """Return the most tokens of a sequence, as far as the model decides, and what decided."""
    positions, window = model_config.max_position_embeddings, model_config.sliding_window
    wanted = config.max_model_len
    if window is not None and wanted is not None and wanted > window:
        raise ConfigError(
            f"max_model_len={wanted} exceeds the model's sliding_window of {window}, and attention "
            "within a window is not supported beyond it"
        )
    if wanted is None:
        return min(positions, window or positions), "the model's config.json allows no more"
    if wanted > positions:
        logger.warning(
            "max_model_len %d exceeds the %d positions that the model was made for",
            wanted,
            positions,
        )
    return wanted, "raise max_model_len"
