"""Tile-sparse attention on a CPU, in time that falls with the number of kept tiles."""

import torch

from nanovllm.ops.backends.base import TILE, TileBackend

# Keys and values gathered for one call of the kernel: more would not stay in cache, less would
# make calls so short that the start of their threads shows.
_GATHERED_BYTES = 8 << 20


class TorchBlockSparse(TileBackend):
    """PyTorch's CPU flash kernel over the gathered keys and values of the kept tiles."""

    name = "torch"

    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        reasons = [] if device.type == "cpu" else [f"needs a CPU, not {device.type}"]
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            reasons.append(f"needs float32, float16 or bfloat16, not {dtype}")
        return reasons

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: torch.Tensor,
        diagonal: int,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_len, num_q_heads, head_dim = query.shape
        k_len, num_kv_heads, _ = key.shape
        _, num_q_tiles, num_k_tiles = tiles.shape
        num_rows = min(TILE, q_len)
        # [num_q_heads * num_q_tiles, num_rows, head_dim]
        q = query.new_zeros(num_q_heads, num_q_tiles * num_rows, head_dim)
        q[:, :q_len] = query.transpose(0, 1)
        q = q.view(num_q_heads * num_q_tiles, num_rows, head_dim)
        # Keys beside values, so that one gather fetches both. What fills up the last tile is never
        # read. [num_kv_heads * num_k_tiles, TILE * 2 * head_dim]
        kv = key.new_empty(num_kv_heads, num_k_tiles * TILE, 2 * head_dim)
        kv[:, :k_len, :head_dim] = key.transpose(0, 1)
        kv[:, :k_len, head_dim:] = value.transpose(0, 1)
        kv = kv.view(num_kv_heads * num_k_tiles, TILE * 2 * head_dim)

        # Query tiles that see equally many keys run as one batch, apart from those whose last tile
        # is the diagonal: only these bear the cost of a mask. Every operation starts threads anew,
        # which is slow on a busy machine, so a batch is one gather and one call.
        tiles = tiles.tril(diagonal)
        kept = tiles.flatten(0, 1)
        num_keys = kept.sum(-1) * TILE - kept[:, -1:].sum(-1) * (num_k_tiles * TILE - k_len)
        sizes, order = (2 * num_keys + _holds_diagonal(tiles, diagonal)).sort(stable=True)
        sizes, order = sizes[sizes > 0], order[sizes > 0]
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
        if len(order):
            rows, columns = kept[order].nonzero(as_tuple=True)
            kv_heads = order[rows] // num_q_tiles // (num_q_heads // num_kv_heads)
            tile_ids = kv_heads * num_k_tiles + columns
            out[order], lse[order] = _attend_to_lists(q[order], kv, tile_ids, sizes, softmax_scale)
        out = out.view(num_q_heads, num_q_tiles * num_rows, head_dim)[:, :q_len]
        lse = lse.view(num_q_heads, num_q_tiles * num_rows)[:, :q_len]
        return out.transpose(0, 1).contiguous(), lse


def _attend_to_lists(
    query: torch.Tensor,
    kv: torch.Tensor,
    tile_ids: torch.Tensor,
    sizes: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each query tile to its own list of key tiles.

    Args:
        query: `[num_lists, num_rows, head_dim]`.
        kv: `[num_tiles, TILE * 2 * head_dim]`.
        tile_ids: the lists, one after the other: rows of `kv`.
        sizes: ascending, `[num_lists]`: twice the keys of the list, and 1 more if the last of its
            tiles is the diagonal.

    Returns:
        Output like `query`, LSE `[num_lists, num_rows]`.
    """
    _, num_rows, head_dim = query.shape
    most = -(-int(sizes[-1]) // (2 * TILE))  # tiles of the longest list
    room = max(most, _GATHERED_BYTES // (kv.shape[1] * kv.element_size()))
    gathered = kv.new_empty(min(room, len(tile_ids)), kv.shape[1])
    mask = _mask_of_last_tile(query, num_rows, most)
    groups, counts = sizes.unique_consecutive(return_counts=True)
    outs, lses = [], []
    for group, members in zip(groups.tolist(), query[:, None].split(counts.tolist()), strict=True):
        num_keys, masked = divmod(group, 2)
        num_tiles = -(-num_keys // TILE)
        hidden = mask[:, (most - num_tiles) * TILE :][:, :num_keys] if masked else None
        for queries in members.split(room // num_tiles):
            ids, tile_ids = tile_ids.tensor_split([len(queries) * num_tiles])
            pairs = torch.index_select(kv, 0, ids, out=gathered[: len(ids)])
            pairs = pairs.view(len(queries), 1, num_tiles * TILE, 2 * head_dim)[:, :, :num_keys]
            keys, values = pairs.split(head_dim, dim=-1)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries, keys, values, 0.0, False, attn_mask=hidden, scale=softmax_scale
            )
            outs.append(out[:, 0])
            lses.append(lse[:, 0])
    return torch.cat(outs), torch.cat(lses)


def _holds_diagonal(tiles: torch.Tensor, diagonal: int) -> torch.Tensor:
    """Return for each (head, query tile), flattened, whether its diagonal tile is kept."""
    num_q_tiles, num_k_tiles = tiles.shape[1:]
    column = torch.arange(num_q_tiles, device=tiles.device)[:, None] + diagonal
    is_diagonal = column == torch.arange(num_k_tiles, device=tiles.device)
    return (tiles & is_diagonal).any(-1).flatten()


def _mask_of_last_tile(like: torch.Tensor, num_rows: int, num_tiles: int) -> torch.Tensor:
    """Return the additive mask over `num_tiles` key tiles, the last of which is the diagonal."""
    mask = like.new_zeros(num_rows, num_tiles * TILE)
    later = torch.ones(num_rows, TILE, dtype=torch.bool, device=like.device).triu(1)
    mask[:, -TILE:].masked_fill_(later, float("-inf"))
    return mask
