"""Which KV block belongs to whom: reference counts, a prefix cache by hash, the order of reuse.

Pure bookkeeping. A block is in use while some sequence's table names it. A block that was filled
keeps its hash when its last user leaves, and can be found again until it is given to someone else.
Blocks without a hash are given out first, then blocks in the order in which they became free.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import xxhash

from nanovllm.engine.sequence import Sequence


def hash_block(parent: bytes, token_ids: Seq[int]) -> bytes:
    """Return the hash of a full block: 128 bits over its tokens and the hash of those before."""
    return xxhash.xxh3_128_digest(parent + np.asarray(token_ids, dtype=np.int64).tobytes())


@dataclass(slots=True)
class Block:
    """State of one KV block."""

    num_users: int = 0
    hash: bytes | None = None
    """Set while the prefix cache may hand the block out."""
    token_ids: tuple[int, ...] = ()
    """The tokens behind `hash`, compared on a hit."""


class BlockManager:
    """Gives KV blocks to sequences and takes them back.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        enable_prefix_caching: whether blocks of equal prefixes are shared.
        caches_answers: whether blocks with generated tokens are. Not if a prefill would compute
            these otherwise than decode did, as a sparse one does.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        caches_answers: bool = True,
    ) -> None:
        self.block_size = block_size
        self._caching = enable_prefix_caching
        self._caches_answers = caches_answers
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[bytes, int] = {}
        # The sequence refused last. Looking up a long prefix takes milliseconds, and until a block
        # is freed or hashed the answer stays the same.
        self._refused: Sequence | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody uses, those that the prefix cache remembers among them."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, seq: Sequence) -> bool:
        """Give a waiting sequence blocks for all its tokens, cached ones for its prefix.

        Sets the sequence's block table and `num_computed_tokens`. At least one token is left to
        compute, since a cached block brings no logits.

        Returns:
            False, with nothing changed, if too few blocks are free.
        """
        if seq is self._refused:
            return False
        shared = self._match_prefix(seq)
        num_new = self.num_blocks_for(seq.num_tokens) - len(shared)
        num_revived = sum(self._blocks[block_id].num_users == 0 for block_id in shared)
        if num_new + num_revived > len(self._free):
            self._refused = seq
            return False
        for block_id in shared:
            self._blocks[block_id].num_users += 1
            self._free.pop(block_id, None)
        # Free blocks come last to first of whoever had them; neighbours in order are read faster.
        seq.block_table = shared + sorted(self._take_free() for _ in range(num_new))
        seq.num_computed_tokens = len(shared) * self.block_size
        return True

    def grow(self, seq: Sequence) -> bool:
        """Give a running sequence the block that its newest token needs, if it needs one.

        Returns:
            False, with nothing changed, if none is free.
        """
        if self.num_blocks_for(seq.num_tokens) > len(seq.block_table):
            if not self._free:
                return False
            seq.block_table.append(self._take_free())
        return True

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """Note that the sequence's next `num_tokens` tokens are in the cache.

        Blocks that are full now can be found by their hash. A block is hashed only when each of
        its tokens was computed: the newest token of a sequence has no keys and values yet.
        """
        first = seq.num_computed_tokens // self.block_size
        seq.num_computed_tokens += num_tokens
        if not self._caching:
            return
        num_tokens = seq.num_computed_tokens
        if not self._caches_answers:
            num_tokens = min(num_tokens, seq.num_prompt_tokens)
        last = num_tokens // self.block_size
        self._hash_up_to(seq, last)
        for i in range(first, last):
            block = self._blocks[seq.block_table[i]]
            digest = seq.block_hashes[i]
            if block.hash is None and digest not in self._cached:
                block.hash, block.token_ids = digest, self._tokens_of(seq, i)
                self._cached[digest] = seq.block_table[i]
                self._refused = None

    def free(self, seq: Sequence) -> None:
        """Take back all blocks of a sequence. The end of a prefix is forgotten before its start."""
        for block_id in reversed(seq.block_table):
            block = self._blocks[block_id]
            block.num_users -= 1
            if block.num_users == 0:
                self._free[block_id] = None
                if block.hash is None:  # nobody will find it: taken again before others are
                    self._free.move_to_end(block_id, last=False)
        seq.block_table = []
        seq.num_computed_tokens = 0
        self._refused = None

    def check_integrity(self, sequences: Seq[Sequence]) -> None:
        """Check the books against the tables of all sequences that hold blocks.

        Raises:
            RuntimeError: a count, a table, the free list or the prefix cache is wrong.
        """
        users = [0] * self.num_blocks
        for seq in sequences:
            num_full = seq.num_computed_tokens // self.block_size
            if self.num_blocks_for(seq.num_computed_tokens) > len(seq.block_table):
                raise RuntimeError(
                    f"{seq.num_computed_tokens} computed tokens, but blocks {seq.block_table}"
                )
            for i, block_id in enumerate(seq.block_table):
                users[block_id] += 1
                digest = self._blocks[block_id].hash
                if digest is not None and (i >= num_full or digest != seq.block_hashes[i]):
                    raise RuntimeError(f"block {block_id}: its hash is not that of its tokens")
        for block_id, block in enumerate(self._blocks):
            if block.num_users != users[block_id]:
                raise RuntimeError(
                    f"block {block_id}: {block.num_users} users, {users[block_id]} in tables"
                )
            if (block.num_users == 0) != (block_id in self._free):
                raise RuntimeError(f"block {block_id}: free list disagrees with its users")
            if block.num_users > 1 and block.hash is None:
                raise RuntimeError(f"block {block_id}: shared, although it is not cached")
            if block.hash is not None and self._cached.get(block.hash) != block_id:
                raise RuntimeError(f"block {block_id}: the prefix cache does not know its hash")
        for digest, block_id in self._cached.items():
            if self._blocks[block_id].hash != digest:
                raise RuntimeError(f"prefix cache: block {block_id} has another hash")

    def _match_prefix(self, seq: Sequence) -> list[int]:
        if not self._caching:
            return []
        matched = []
        for i in range((seq.num_tokens - 1) // self.block_size):
            self._hash_up_to(seq, i + 1)
            block_id = self._cached.get(seq.block_hashes[i])
            if block_id is None or self._blocks[block_id].token_ids != self._tokens_of(seq, i):
                break
            matched.append(block_id)
        return matched

    def _take_free(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self._blocks[block_id]
        if block.hash is not None:
            del self._cached[block.hash]
        block.num_users, block.hash, block.token_ids = 1, None, ()
        return block_id

    def _hash_up_to(self, seq: Sequence, num_blocks: int) -> None:
        for i in range(len(seq.block_hashes), num_blocks):
            parent = seq.block_hashes[-1] if i else b""
            seq.block_hashes.append(hash_block(parent, self._tokens_of(seq, i)))

    def _tokens_of(self, seq: Sequence, index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(seq.token_ids[start : start + self.block_size])
