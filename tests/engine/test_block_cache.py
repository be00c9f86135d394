"""What the prefix cache remembers and for how long, and what `check_integrity` finds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE = 2

Plant = Callable[[BlockManager, list[Sequence]], None]


def make_sequence(token_ids: list[int]) -> Sequence:
    return Sequence(0, list(token_ids), SamplingParams(), None, Random(0), 0.0)


def compute_and_free(manager: BlockManager, token_ids: list[int]) -> list[int]:
    """Run a sequence through and return the blocks that it had."""
    seq = make_sequence(token_ids)
    assert manager.allocate(seq)
    manager.commit(seq, seq.num_uncomputed_tokens)
    table = list(seq.block_table)
    manager.free(seq)
    return table


def num_cached(manager: BlockManager, token_ids: list[int]) -> int:
    """Return how many tokens a sequence finds in the cache, and change nothing but the order."""
    seq = make_sequence(token_ids)
    assert manager.allocate(seq)
    num_tokens = seq.num_computed_tokens
    manager.free(seq)
    return num_tokens


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 0), (2, 0), (3, 2), (6, 4), (7, 6)])
def test_all_full_blocks_but_the_last_token_hit(num_tokens: int, expected: int) -> None:
    manager = BlockManager(8, BLOCK_SIZE, True)
    compute_and_free(manager, list(range(num_tokens)))
    assert num_cached(manager, list(range(num_tokens))) == expected


def test_the_end_of_a_prefix_is_forgotten_first() -> None:
    manager = BlockManager(4, BLOCK_SIZE, True)
    compute_and_free(manager, [1, 2, 3, 4, 5, 6])
    compute_and_free(manager, [7, 8, 9])  # takes the block that was never used, and one more
    assert num_cached(manager, [1, 2, 3, 4, 5, 6, 0]) == 4


def test_what_was_used_last_is_forgotten_last() -> None:
    manager = BlockManager(5, BLOCK_SIZE, True)
    compute_and_free(manager, [1, 2, 3, 4])
    compute_and_free(manager, [5, 6, 7, 8])
    assert num_cached(manager, [1, 2, 3, 4, 0]) == 4
    compute_and_free(manager, [9, 10, 11, 12])
    assert num_cached(manager, [1, 2, 3, 4, 0]) == 4
    assert num_cached(manager, [5, 6, 7, 8, 0]) < 4


@pytest.mark.parametrize("caching", [True, False])
def test_blocks_that_nobody_will_find_are_taken_first(caching: bool) -> None:
    """So that memory for blocks that were never used is not touched before it is needed."""
    manager = BlockManager(100, BLOCK_SIZE, caching)
    for start in range(10):
        seq = make_sequence([start, 2, 3])
        assert manager.allocate(seq)
        assert max(seq.block_table) <= (start + 1 if caching else 1)
        manager.commit(seq, 3)
        manager.free(seq)


def test_a_running_sequence_shares_its_full_blocks() -> None:
    manager = BlockManager(4, BLOCK_SIZE, True)
    first, second = make_sequence([1, 2, 3]), make_sequence([1, 2, 4])
    assert manager.allocate(first)
    manager.commit(first, 3)
    assert manager.allocate(second)
    assert first.block_table[0] == second.block_table[0]
    assert first.block_table[1] != second.block_table[1]
    assert manager.num_free_blocks == 1


def test_a_chunk_shares_only_what_it_filled() -> None:
    manager = BlockManager(8, BLOCK_SIZE, True)
    first = make_sequence([1, 2, 3, 4, 5])
    assert manager.allocate(first)
    manager.commit(first, 3)
    assert num_cached(manager, [1, 2, 3, 4, 5]) == 2
    manager.commit(first, 1)
    assert num_cached(manager, [1, 2, 3, 4, 5]) == 4


def test_without_caching_nothing_is_shared() -> None:
    manager = BlockManager(8, BLOCK_SIZE, False)
    compute_and_free(manager, [1, 2, 3])
    assert num_cached(manager, [1, 2, 3]) == 0


# check_integrity finds planted faults.


def books() -> tuple[BlockManager, list[Sequence]]:
    """Two sequences that share one block of three, a cached free one, and blocks never used."""
    manager = BlockManager(8, BLOCK_SIZE, True)
    compute_and_free(manager, [9, 9, 9])
    sequences = [make_sequence([1, 2, 3, 4, 5]), make_sequence([1, 2, 6, 7, 8])]
    for seq in sequences:
        assert manager.allocate(seq)
        manager.commit(seq, seq.num_uncomputed_tokens)
    return manager, sequences


def miscount(difference: int) -> Plant:
    def plant(manager: BlockManager, sequences: list[Sequence]) -> None:
        manager._blocks[sequences[0].block_table[0]].num_users += difference

    return plant


def drop_a_table_entry(manager: BlockManager, sequences: list[Sequence]) -> None:
    sequences[1].block_table.pop()


def name_a_block_twice(manager: BlockManager, sequences: list[Sequence]) -> None:
    sequences[1].block_table[1] = sequences[1].block_table[0]


def use_a_free_block(manager: BlockManager, sequences: list[Sequence]) -> None:
    sequences[1].block_table.append(next(iter(manager._free)))


def lose_a_block(manager: BlockManager, sequences: list[Sequence]) -> None:
    manager._free.popitem()


def free_a_used_block(manager: BlockManager, sequences: list[Sequence]) -> None:
    manager._free[sequences[0].block_table[-1]] = None


def forget_a_hash(manager: BlockManager, sequences: list[Sequence]) -> None:
    manager._cached.pop(sequences[0].block_hashes[0])


def cache_another_block(manager: BlockManager, sequences: list[Sequence]) -> None:
    manager._cached[sequences[0].block_hashes[0]] = sequences[0].block_table[1]


def cache_an_unfilled_block(manager: BlockManager, sequences: list[Sequence]) -> None:
    manager._cached[b"unknown"] = sequences[0].block_table[-1]


def swap_hashes(manager: BlockManager, sequences: list[Sequence]) -> None:
    first, second = sequences[0].block_table[:2]
    one, other = manager._blocks[first], manager._blocks[second]
    one.hash, other.hash = other.hash, one.hash
    manager._cached.update({one.hash: first, other.hash: second})


def hash_an_unfilled_block(manager: BlockManager, sequences: list[Sequence]) -> None:
    block_id = sequences[0].block_table[-1]
    manager._blocks[block_id].hash = b"too early"
    manager._cached[b"too early"] = block_id


def share_an_unfilled_block(manager: BlockManager, sequences: list[Sequence]) -> None:
    ours, theirs = sequences[0].block_table[-1], sequences[1].block_table[-1]
    sequences[1].block_table[-1] = ours
    manager._blocks[ours].num_users, manager._blocks[theirs].num_users = 2, 0
    manager._free[theirs] = None


def compute_beyond_the_table(manager: BlockManager, sequences: list[Sequence]) -> None:
    sequences[0].num_computed_tokens += BLOCK_SIZE


@pytest.mark.parametrize(
    "plant",
    [
        miscount(1),
        miscount(-1),
        drop_a_table_entry,
        name_a_block_twice,
        use_a_free_block,
        lose_a_block,
        free_a_used_block,
        forget_a_hash,
        cache_another_block,
        cache_an_unfilled_block,
        swap_hashes,
        hash_an_unfilled_block,
        share_an_unfilled_block,
        compute_beyond_the_table,
    ],
)
def test_check_integrity_finds(plant: Plant) -> None:
    manager, sequences = books()
    manager.check_integrity(sequences)
    plant(manager, sequences)
    with pytest.raises(RuntimeError, match="block"):
        manager.check_integrity(sequences)


def test_check_integrity_finds_a_sequence_that_was_left_out() -> None:
    manager, sequences = books()
    with pytest.raises(RuntimeError, match="users"):
        manager.check_integrity(sequences[:1])
