"""How host and device memory are shared out when the KV cache is in host memory."""

from dataclasses import dataclass

from nanovllm.config import Config
from nanovllm.device import Device, free_host_bytes
from nanovllm.errors import CapacityError
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.page_budget import PageBudget
from nanovllm.log import get_logger

logger = get_logger(__name__)

_GIB = 1 << 30
_HOST_SHARE = 0.5  # of what is free: pinned memory is lost to everyone else
_CPU_SHARE = 0.25  # where the device computes in the same memory, and other programs live there too
_RING_TOKENS = 65536  # half of them is what attention gets at a time: long enough to be efficient
_STAGING_BYTES = 64 << 20  # two copies in flight, each long enough to run at full speed

_HOT_STEPS = 4  # pages of so many steps stay on the device
_HOT_SHARE = 0.25  # of what is free there, for the pages of all sequences
_MAX_ROWS = 8  # sequences that have memory of their own on the device


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What the memory of host and device holds."""

    num_host_blocks: int
    num_slots: int
    num_staging: int
    max_model_len: int
    length_reason: str
    """What bounds `max_model_len`."""


def plan_offload(
    config: Config, device: Device, layout: KVLayout, max_model_len: int, length_reason: str
) -> OffloadPlan:
    """Decide how many blocks host memory holds, and the sizes of ring and staging.

    Raises:
        CapacityError: not even one block fits into the host memory allowed, or not the
            `max_model_len` that was asked for, or the ring does not fit on the device.
    """
    num_blocks = _num_host_blocks(config, device, layout)
    capacity = num_blocks * layout.block_size
    if capacity < max_model_len:
        needed = layout.num_blocks_for(max_model_len) * layout.block_bytes
        length_reason = (
            f"the host KV cache has {num_blocks} blocks of {layout.block_size} tokens, "
            f"{num_blocks * layout.block_bytes / _GIB:.3g} GiB; raise cpu_memory_gb"
        )
        if config.max_model_len is not None:
            raise CapacityError(
                f"max_model_len={max_model_len} needs {needed / _GIB:.3g} GiB of host KV cache, "
                f"and {length_reason}, or lower max_model_len"
            )
        logger.warning(
            "max_model_len %d is bounded to the %d tokens that the host KV cache holds",
            max_model_len,
            capacity,
        )
        max_model_len = capacity
    longest = layout.num_blocks_for(max_model_len)
    num_slots = config.num_gpu_blocks or max(2, min(_RING_TOKENS // layout.block_size, 2 * longest))
    chunk_blocks = layout.num_blocks_for(min(config.max_num_batched_tokens, max_model_len))
    num_staging = max(2, min(_STAGING_BYTES // layout.layer_block_bytes, 2 * chunk_blocks))
    # Ring, window of half its size, staging and tails; each tail is a block of a layer.
    num_buffers = num_slots + num_slots // 2 + num_staging + layout.num_layers
    if num_buffers * layout.layer_block_bytes > device.free_memory_bytes():
        raise CapacityError(
            f"num_gpu_blocks={num_slots}: the ring and what belongs to it need "
            f"{num_buffers * layout.layer_block_bytes / _GIB:.2f} GiB on {device.name}, and "
            f"{device.free_memory_bytes() / _GIB:.2f} GiB are free. Lower num_gpu_blocks or "
            "kvcache_block_size"
        )
    logger.info(
        "KV cache: up to %d blocks of %d tokens, %.2f GiB, in host memory; %d slots on %s",
        num_blocks,
        layout.block_size,
        num_blocks * layout.block_bytes / _GIB,
        num_slots,
        device.name,
    )
    return OffloadPlan(num_blocks, num_slots, num_staging, max_model_len, length_reason)


def plan_hot_slots(
    config: Config,
    device: Device,
    layout: KVLayout,
    budget: PageBudget,
    max_blocks: int,
    num_host_blocks: int,
) -> tuple[int, int]:
    """Return how many sequences decode at once, and how many pages of each the device keeps.

    Args:
        config: the options.
        device: with the weights there, ring and staging not yet.
        layout: shape of the KV cache.
        budget: what a step attends to.
        max_blocks: most KV blocks of a sequence.
        num_host_blocks: blocks of which the index lies on the device.

    Returns:
        Sequences, and for each of them the pages of each layer and KV head.

    Raises:
        CapacityError: the pages of one step do not fit into what the option allows, or what is
            needed not on the device.
    """
    max_pages = max_blocks * layout.block_size // budget.page_size
    num_chosen = budget.num_chosen(max_pages)
    slot_bytes = layout.num_layers * budget.page_size * layout.token_bytes
    index_bytes = (num_host_blocks + 1) * layout.page_index_bytes(budget)
    free = device.free_memory_bytes() - index_bytes
    if config.decode_hot_cache_gb:
        num_slots = int(config.decode_hot_cache_gb * _GIB) // slot_bytes
        if num_slots < num_chosen:
            raise CapacityError(
                f"decode_hot_cache_gb={config.decode_hot_cache_gb} holds {num_slots} pages of each "
                f"KV head, and a step attends to {num_chosen}, "
                f"{num_chosen * slot_bytes / _GIB:.2f} GiB. Raise it, or lower decode_token_budget"
            )
        wanted = max_pages
    else:
        num_slots = max(num_chosen, int(free * _HOT_SHARE) // slot_bytes)
        on_cpu = device.torch_device.type == "cpu"
        wanted = (
            num_chosen if on_cpu or config.decode_hot_cache_gb == 0 else _HOT_STEPS * num_chosen
        )
    num_rows = min(config.max_num_seqs, _MAX_ROWS, num_slots // num_chosen)
    num_hot = min(num_slots // num_rows, wanted, max_pages)
    tail_bytes = num_rows * layout.block_bytes
    needed = num_rows * num_hot * slot_bytes + tail_bytes
    if needed > free:
        raise CapacityError(
            f"the pages of decode need {(needed + index_bytes) / _GIB:.2f} GiB on {device.name}, "
            f"{index_bytes / _GIB:.2f} GiB of them for the index of {num_host_blocks} host blocks, "
            f"and {(free + index_bytes) / _GIB:.2f} GiB are free. Lower decode_hot_cache_gb, "
            "decode_token_budget or cpu_memory_gb"
        )
    logger.info(
        "decode: %d sequences at once, %d of %d pages of each KV head on the device",
        num_rows,
        num_hot,
        max_pages,
    )
    return num_rows, num_hot


def plan_whole_prefill(
    config: Config,
    device: Device,
    max_model_len: int,
    token_bytes: int,
    activation_bytes: int,
) -> int:
    """Return the most tokens that a layer-major prefill may have; 0 if there is to be none.

    Args:
        config: the options.
        device: with weights, ring and staging already there.
        max_model_len: most tokens of a sequence; no chunk is longer.
        token_bytes: what each of its tokens takes.
        activation_bytes: the most that a chunk takes beside that.

    Raises:
        CapacityError: not even one chunk fits.
    """
    total, free = device.total_memory_bytes(), device.free_memory_bytes()
    if device.torch_device.type == "cpu":
        budget = int(free * _CPU_SHARE)
    else:
        budget = int(total * config.gpu_memory_utilization) - (total - free) - activation_bytes
    max_tokens = max(0, budget) // token_bytes
    chunk_tokens = min(config.max_num_batched_tokens, max_model_len)
    if max_tokens < chunk_tokens:
        needed = chunk_tokens * token_bytes + activation_bytes
        raise CapacityError(
            f"a chunk of {chunk_tokens} tokens needs {needed / _GIB:.2f} GiB on "
            f"{device.name}, and {(budget + activation_bytes) / _GIB:.2f} GiB are left. Lower "
            "max_num_batched_tokens or num_gpu_blocks, or raise gpu_memory_utilization"
        )
    return 0 if config.prefill_order == "chunk" else max_tokens


def reserve_layer(engine: OffloadEngine, max_model_len: int) -> None:
    """Let the prefill buffer hold one layer of the longest sequence.

    Raises:
        CapacityError: it does not fit.
    """
    device, layout = engine.device, engine.pool.layout
    needed = layout.num_blocks_for(max_model_len) * layout.layer_block_bytes
    free = device.free_memory_bytes()
    if needed > free:
        raise CapacityError(
            f"the policy needs the keys and values of one layer together: {needed / _GIB:.2f} GiB "
            f"for max_model_len={max_model_len}, and {free / _GIB:.2f} GiB are free on "
            f"{device.name}. Lower max_model_len"
        )
    engine.recent.reserve(max_model_len)


def _num_host_blocks(config: Config, device: Device, layout: KVLayout) -> int:
    free = free_host_bytes()
    if config.num_kvcache_blocks is not None:
        budget = config.num_kvcache_blocks * layout.block_bytes
        source = f"num_kvcache_blocks={config.num_kvcache_blocks}"
    elif config.cpu_memory_gb is not None:
        budget = int(config.cpu_memory_gb * _GIB)
        source = f"cpu_memory_gb={config.cpu_memory_gb}"
    else:
        share = _CPU_SHARE if device.torch_device.type == "cpu" else _HOST_SHARE
        budget = int(free * share)
        source = f"{share:.0%} of the {free / _GIB:.1f} GiB free"
    num_blocks = budget // layout.block_bytes
    if num_blocks < 1:
        raise CapacityError(
            f"no room for the host KV cache: one block of {layout.block_size} tokens needs "
            f"{layout.block_bytes / _GIB:.3g} GiB, and {source} gives {budget / _GIB:.3g} GiB. "
            "Raise cpu_memory_gb, or lower kvcache_block_size"
        )
    if budget > free:
        # A virtual machine may be given memory only when it asks for it.
        logger.warning(
            "%s: the host KV cache may grow to %.1f GiB, more than the %.1f GiB that the system "
            "reports as free",
            source,
            budget / _GIB,
            free / _GIB,
        )
    return num_blocks
