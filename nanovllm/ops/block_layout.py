"""Between token-major tensors, as attention reads them, and head-major blocks, as hosts hold them.

In a head-major block the tokens of one KV head follow each other, so that a processor streams a
head's keys; a token-major tensor is what projections write and what attention kernels read.
"""

import torch

from nanovllm.ops import reference


def pack_blocks(tokens: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy token-major `tokens` into head-major `blocks`, which it overwrites, bit by bit.

    Args:
        tokens: `[num_blocks * block_size, num_kv_heads, head_dim]`.
        blocks: `[num_blocks, num_kv_heads, block_size, head_dim]`, of the same dtype and device;
            `num_blocks` may be 0. On both, the last axis is contiguous and the other strides are
            free. Does not synchronise.

    Raises:
        ValueError: shapes that do not fit each other, two dtypes, or a last axis with gaps.
    """
    _check(tokens, blocks)
    if tokens.is_cuda:
        from nanovllm.ops.kernels import block_layout

        block_layout.pack_blocks(tokens, blocks)
    else:
        blocks.copy_(reference.pack_blocks(tokens, blocks.shape[2]))


def unpack_blocks(blocks: torch.Tensor, tokens: torch.Tensor) -> None:
    """Copy head-major `blocks` into token-major `tokens`, which it overwrites: undo `pack_blocks`.

    Shapes, dtypes, strides and errors are those of `pack_blocks`. Does not synchronise.
    """
    _check(tokens, blocks)
    if tokens.is_cuda:
        from nanovllm.ops.kernels import block_layout

        block_layout.unpack_blocks(blocks, tokens)
    else:
        # Writes through a view of `tokens`, whose first axis can always be split.
        reference.pack_blocks(tokens, blocks.shape[2]).copy_(blocks)


def _check(tokens: torch.Tensor, blocks: torch.Tensor) -> None:
    if blocks.dim() != 4 or tokens.dim() != 3:
        raise ValueError(
            f"tokens of {tokens.dim()} axes and blocks of {blocks.dim()}; 3 and 4 are needed"
        )
    num_blocks, num_kv_heads, block_size, head_dim = blocks.shape
    if tokens.shape != (num_blocks * block_size, num_kv_heads, head_dim):
        raise ValueError(
            f"tokens of shape {list(tokens.shape)} do not fit blocks of shape "
            f"{list(blocks.shape)}, which hold {[num_blocks * block_size, num_kv_heads, head_dim]}"
        )
    if tokens.dtype != blocks.dtype:
        raise ValueError(f"tokens of {tokens.dtype} and blocks of {blocks.dtype}; a copy is of one")
    if tokens.stride(2) != 1 or blocks.stride(3) != 1:
        raise ValueError(
            f"last axes of stride {tokens.stride(2)} (tokens) and {blocks.stride(3)} (blocks); "
            "both must be contiguous"
        )
