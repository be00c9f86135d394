"""How many KV blocks the memory of a device holds."""

from nanovllm.config import Config
from nanovllm.device import Device
from nanovllm.errors import CapacityError
from nanovllm.log import get_logger

logger = get_logger(__name__)

_CPU_SHARE = 0.25  # of the free memory: other programs live there too
_MIB = 1 << 20


def plan_kv_cache(
    config: Config, device: Device, block_bytes: int, max_model_len: int, activation_bytes: int
) -> int:
    """Return the number of KV blocks to allocate.

    Args:
        config: the options; an explicit `num_kvcache_blocks` is taken as it is.
        device: where the cache will lie, with the weights already there.
        block_bytes: size of one block over all layers.
        max_model_len: most tokens of one sequence.
        activation_bytes: the most that a step takes beside weights and cache.

    Raises:
        CapacityError: not even one block fits, or not the number asked for.
    """
    free = device.free_memory_bytes()
    if config.num_kvcache_blocks is not None:
        needed = config.num_kvcache_blocks * block_bytes
        if needed > free:
            raise CapacityError(
                f"num_kvcache_blocks={config.num_kvcache_blocks} needs {needed / _MIB:.0f} MiB, "
                f"and {free / _MIB:.0f} MiB are free on {device.name}"
            )
        return config.num_kvcache_blocks
    if device.torch_device.type == "cpu":
        budget = int(free * _CPU_SHARE)
    else:
        total = device.total_memory_bytes()
        used = total - free
        budget = int(total * config.gpu_memory_utilization) - used - activation_bytes
    if budget < block_bytes:
        raise CapacityError(
            f"no room for the KV cache: one block of {config.block_size} tokens needs "
            f"{block_bytes / _MIB:.0f} MiB and {max(0, budget) / _MIB:.0f} MiB are left of "
            f"{free / _MIB:.0f} MiB free. Free memory, or lower max_num_batched_tokens, "
            "max_num_seqs or kvcache_block_size, or raise gpu_memory_utilization."
        )
    most_useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    num_blocks = min(budget // block_bytes, most_useful)
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB on %s",
        num_blocks,
        config.block_size,
        num_blocks * block_bytes / 2**30,
        device.name,
    )
    return num_blocks
