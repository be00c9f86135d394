"""Copy between token-major tensors and head-major KV blocks: one kernel for both directions."""

import torch
import triton
import triton.language as tl

_PROGRAM_BYTES = 16384  # what a program copies: 16 bytes a thread, eight times in flight
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _copy_tokens_kernel(
    source_ptr,
    target_ptr,
    num_tokens,
    source_block_stride,
    source_head_stride,
    source_token_stride,
    target_block_stride,
    target_head_stride,
    target_token_stride,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    # Neighbouring programs copy the heads of the same tokens, which lie together in the
    # token-major tensor. A tile runs over the borders of blocks, so that small ones, and sizes
    # that are no power of two, still fill it.
    head = (tl.program_id(0) % NUM_KV_HEADS).to(tl.int64)
    token = tl.program_id(0) // NUM_KV_HEADS * TILE + tl.arange(0, TILE)
    block = (token // BLOCK_SIZE).to(tl.int64)
    offset = (token % BLOCK_SIZE).to(tl.int64)
    dims = tl.arange(0, DIM_PAD)
    inside = (token < num_tokens)[:, None] & (dims < DIM)[None, :]
    source = block * source_block_stride + offset * source_token_stride + head * source_head_stride
    target = block * target_block_stride + offset * target_token_stride + head * target_head_stride
    copied = tl.load(source_ptr + source[:, None] + dims[None, :], mask=inside)
    tl.store(target_ptr + target[:, None] + dims[None, :], copied, mask=inside)


def _copy(source, source_strides, target, target_strides, num_blocks, heads, block_size, dim):
    num_tokens = num_blocks * block_size
    if num_tokens == 0:
        return
    # As integers: whatever the bits mean, they pass unchanged, and half types share a kernel.
    integer = _INTEGERS[source.element_size()]
    dim_pad = triton.next_power_of_2(dim)
    tile = max(1, _PROGRAM_BYTES // (dim_pad * source.element_size()))
    _copy_tokens_kernel[(triton.cdiv(num_tokens, tile) * heads,)](
        source.view(integer),
        target.view(integer),
        num_tokens,
        *source_strides,
        *target_strides,
        NUM_KV_HEADS=heads,
        BLOCK_SIZE=block_size,
        DIM=dim,
        DIM_PAD=dim_pad,
        TILE=tile,
        num_warps=4,
    )


def _token_major_strides(tokens, block_size):
    token_stride, head_stride, _ = tokens.stride()
    return block_size * token_stride, head_stride, token_stride


def pack_blocks(tokens: torch.Tensor, blocks: torch.Tensor) -> None:
    """See `ops.block_layout.pack_blocks`."""
    strides = _token_major_strides(tokens, blocks.shape[2])
    _copy(tokens, strides, blocks, blocks.stride()[:3], *blocks.shape)


def unpack_blocks(blocks: torch.Tensor, tokens: torch.Tensor) -> None:
    """See `ops.block_layout.unpack_blocks`."""
    strides = _token_major_strides(tokens, blocks.shape[2])
    _copy(blocks, blocks.stride()[:3], tokens, strides, *blocks.shape)
