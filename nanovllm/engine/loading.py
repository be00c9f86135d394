"""From a model directory to a runner: device, weights, memory plan, cache, in that order."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch

from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.engine.memory_plan import plan_kv_cache
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.offload_plan import (
    OffloadPlan,
    plan_hot_slots,
    plan_offload,
    plan_whole_prefill,
    reserve_layer,
)
from nanovllm.engine.offload_runner import OffloadRunner
from nanovllm.engine.page_decoder import PageDecoder
from nanovllm.engine.runner import Runner
from nanovllm.engine.sampler import Sampler
from nanovllm.engine.scheduler import Step
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import CapacityError, ConfigError
from nanovllm.kvcache.hot_pages import HotPages
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.resident import ResidentKVCache
from nanovllm.kvcache.sparse.registry import create_policies
from nanovllm.layers.attention import Attention
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.log import get_logger
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.loader import load_model
from nanovllm.ops.backends import has_dense_form, resolve_backend, resolve_tile_backend
from nanovllm.ops.block_sparse import TILE
from nanovllm.sampling_params import SamplingParams

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner, and what its making decided."""

    runner: Runner
    backend_name: str
    dtype: torch.dtype
    num_blocks: int
    """KV blocks of its cache."""
    max_model_len: int
    """Most tokens of one sequence."""
    length_reason: str
    """What bounds `max_model_len`, and how to raise it if one can."""
    max_num_seqs: int
    """Most sequences of a step."""
    chunk_multiple: int
    """Where chunks end that are not a prompt's last, in tokens."""
    caches_answers: bool
    """See `Attention.caches_answers`."""
    max_whole_prefill_tokens: int = 0
    """Most tokens of a prefill that one step computes, layer-major, whatever its budget."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What every runner is made of."""

    model: LlamaForCausalLM
    rotary: RotaryEmbedding
    attention: Attention
    device: Device
    layout: KVLayout

    @property
    def chunk_multiple(self) -> int:
        """Where chunks end that are not a prompt's last, in tokens."""
        return TILE if self.attention.prefill.works_on_tiles else 1

    def longest_step(self, chunk_tokens: int, max_model_len: int) -> tuple[int, int]:
        """Return the tokens before the largest step's chunk, and those of the chunk.

        With tiles the last one is not whole: then an estimate copies all keys.
        """
        num_tokens = min(chunk_tokens, max_model_len)
        if self.chunk_multiple > 1 and num_tokens > 1:
            num_tokens -= 1
        num_history = max_model_len - num_tokens
        return num_history - num_history % self.chunk_multiple, num_tokens


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
    attention = _attention(config, device, dtype, model_config.head_dim)
    rotary = RotaryEmbedding(model_config.hf, model_config.head_dim, device.torch_device)
    max_model_len, length_reason = _max_model_len(config, model_config)
    dummy_seed = config.seed if config.load_format == "dummy" else None
    model = load_model(directory, model_config, dtype, device, dummy_seed)
    layout = KVLayout(
        model_config.num_layers,
        config.block_size,
        model_config.num_kv_heads,
        model_config.head_dim,
        dtype,
    )
    parts = _Parts(model, rotary, attention, device, layout)
    make = _make_offloaded if config.enable_offload else _make_resident
    loaded = make(config, parts, max_model_len, length_reason)
    loaded.runner.reset_stats()
    return loaded


def _attention(config: Config, device: Device, dtype: torch.dtype, head_dim: int) -> Attention:
    """Make the policies and choose their kernels.

    Raises:
        ConfigError: a policy lacks its phase, or blocks or chunks do not hold whole tiles.
        BackendUnavailableError: the named backend cannot run here, or not what the policy needs.
    """
    prefill, decode = create_policies(config)
    if decode.pages is not None and config.block_size % decode.pages.page_size:
        raise ConfigError(
            f"kvcache_block_size={config.block_size} is not a multiple of the pages of "
            f"{decode.pages.page_size} tokens of {type(decode).__name__}"
        )
    kernel = (config.attention_backend, device.torch_device, dtype, head_dim)
    tile_backend = None
    if prefill.works_on_tiles:
        name = type(prefill).__name__
        if config.block_size % TILE:
            raise ConfigError(
                f"kvcache_block_size={config.block_size} is not a multiple of {TILE}, the tile of "
                f"{name}"
            )
        if config.max_num_batched_tokens < TILE:
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} holds no tile of {TILE} "
                f"tokens, as {name} needs"
            )
        tile_backend = resolve_tile_backend(*kernel)
        if not has_dense_form(tile_backend.name):
            kernel = ("auto", *kernel[1:])  # for what the policy attends to densely, and decode
    return Attention(prefill, decode, resolve_backend(*kernel), tile_backend)


def _make_resident(
    config: Config, parts: _Parts, max_model_len: int, length_reason: str
) -> LoadedModel:
    device, layout = parts.device, parts.layout
    pages = parts.attention.decode.pages
    block_bytes = layout.block_bytes
    if pages is not None:
        block_bytes += layout.page_index_bytes(pages)

    def make_runner(num_blocks: int) -> ModelRunner:
        return ModelRunner(
            parts.model,
            parts.rotary,
            ResidentKVCache(layout, num_blocks, device.torch_device, pages),
            parts.attention,
            device,
            max_model_len,
        )

    # The largest step is the last chunk of the longest prompt, whose history lies in scattered
    # blocks and is gathered. The history's blocks stand for each other.
    num_history, num_tokens = parts.longest_step(config.max_num_batched_tokens, max_model_len)
    num_blocks = layout.num_blocks_for(num_tokens)
    many = min(config.max_num_seqs, config.max_num_batched_tokens)
    seq = _probe_sequence(num_history + num_tokens)
    seq.num_computed_tokens = num_history
    seq.block_table = [
        i % num_blocks for i in reversed(range(layout.num_blocks_for(seq.num_tokens)))
    ]
    probe = make_runner(num_blocks)
    step_bytes = device.peak_memory_bytes(partial(_run, probe, device, seq, num_tokens, many))
    del probe

    num_blocks = plan_kv_cache(config, device, block_bytes, max_model_len, step_bytes)
    capacity = num_blocks * layout.block_size
    if capacity < max_model_len:
        logger.warning(
            "max_model_len %d is bounded to the %d tokens that the KV cache holds",
            max_model_len,
            capacity,
        )
        max_model_len = capacity
        length_reason = (
            f"the KV cache has {num_blocks} blocks of {layout.block_size} tokens; free memory, or "
            "raise num_kvcache_blocks"
        )
    runner = make_runner(num_blocks)
    if device.records_graphs and not config.enforce_eager:
        runner.capture_graphs(min(config.max_num_seqs, num_blocks))
    return LoadedModel(
        runner=runner,
        backend_name=parts.attention.backend.name,
        dtype=layout.dtype,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        length_reason=length_reason,
        max_num_seqs=config.max_num_seqs,
        chunk_multiple=parts.chunk_multiple,
        caches_answers=parts.attention.caches_answers,
    )


def _make_offloaded(
    config: Config, parts: _Parts, max_model_len: int, length_reason: str
) -> LoadedModel:
    device, layout = parts.device, parts.layout
    together = parts.attention.prefill.works_on_tiles
    chunk_tokens = config.max_num_batched_tokens
    chunk_tokens -= chunk_tokens % parts.chunk_multiple
    plan = plan_offload(config, device, layout, max_model_len, length_reason)
    hot = _make_hot_pages(config, parts, plan)
    engine = OffloadEngine(
        device, layout, plan.num_host_blocks, plan.num_slots, plan.num_staging, hot
    )
    decoder = None
    if hot is not None:
        decoder = PageDecoder(
            parts.model, parts.rotary, engine, hot, parts.attention, device, plan.max_model_len
        )
    num_rows = 1 if hot is None else hot.num_rows
    runner = OffloadRunner(
        parts.model,
        parts.rotary,
        engine,
        parts.attention,
        device,
        chunk_tokens,
        decoder,
        num_rows,
        config.enable_nvtx,
    )
    # The largest step is a chunk whose history comes from the host. Where that is merged, one block
    # of it will do, since what holds more is there already; a policy that works on tiles takes
    # memory for all of it.
    num_history, num_tokens = parts.longest_step(chunk_tokens, plan.max_model_len)
    if together:
        num_history -= num_history % layout.block_size
    else:
        num_history = min(layout.block_size, num_history)
    seq = _probe_sequence(num_history + num_tokens)
    first = min(layout.block_size, num_history)
    num_same = layout.num_blocks_for(num_history)
    num_new = layout.num_blocks_for(seq.num_tokens) - num_same
    seq.block_table = [0] * num_same + [min(1, num_same) + i for i in range(num_new)]

    def run_both() -> None:
        for start, count in ((0, first), (num_history, num_tokens)):
            seq.num_computed_tokens = start
            if count:
                _run(runner, device, seq, count, many=1)

    # Hidden state, rotary angles in fp32, and the layer's keys and values, if not yet allocated.
    token_bytes = parts.model.config.hidden_size * layout.dtype.itemsize + 4 * layout.head_dim
    with ExitStack() as undo:
        undo.callback(runner.close)
        if together:
            reserve_layer(engine, plan.max_model_len)
        else:
            token_bytes += layout.token_bytes
        step_bytes = device.peak_memory_bytes(run_both)
        max_whole_prefill_tokens = plan_whole_prefill(
            config, device, plan.max_model_len, token_bytes, step_bytes
        )
        if decoder is not None and device.records_graphs and not config.enforce_eager:
            with device.active():
                decoder.capture_graphs()
        undo.pop_all()
    return LoadedModel(
        runner=runner,
        backend_name=parts.attention.backend.name,
        dtype=layout.dtype,
        num_blocks=plan.num_host_blocks,
        max_model_len=plan.max_model_len,
        length_reason=plan.length_reason,
        max_num_seqs=num_rows,
        chunk_multiple=parts.chunk_multiple,
        caches_answers=parts.attention.caches_answers,
        max_whole_prefill_tokens=max_whole_prefill_tokens,
    )


def _make_hot_pages(config: Config, parts: _Parts, plan: OffloadPlan) -> HotPages | None:
    """Make room for decode's pages on the device, if it chooses pages."""
    budget, layout = parts.attention.decode.pages, parts.layout
    if budget is None:
        return None
    max_blocks = layout.num_blocks_for(plan.max_model_len)
    num_rows, num_hot = plan_hot_slots(
        config, parts.device, layout, budget, max_blocks, plan.num_host_blocks
    )
    return HotPages(
        parts.device,
        layout,
        plan.num_host_blocks,
        max_blocks,
        budget,
        num_rows,
        num_hot,
        keeps=config.decode_hot_cache_gb != 0,
    )


def _probe_sequence(num_tokens: int) -> Sequence:
    """Return a sequence whose sampling uses every filter."""
    params = SamplingParams(top_p=0.5, repetition_penalty=1.1)
    return Sequence(0, [0] * num_tokens, params, None, Random(0), 0.0)


def _run(runner: Runner, device: Device, seq: Sequence, num_tokens: int, many: int) -> None:
    """Compute the next tokens of a sequence, and sample as if it stood for `many`."""
    logits = runner.run(Step(prefills=[(seq, num_tokens)]))
    if len(logits):
        Sampler(device).sample(logits.expand(many, -1).clone(), [seq] * many)


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
