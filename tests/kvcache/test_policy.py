"""Sparse policies: what a selection computes, and how policies are found."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import assert_close

from nanovllm import ConfigError, SparsePolicyType
from nanovllm.config import Config
from nanovllm.device import create_device
from nanovllm.kvcache.attention_batch import PrefillSegment, slot_index
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.resident import ResidentKVCache
from nanovllm.kvcache.source import ResidentSource
from nanovllm.kvcache.sparse.full import FullAttentionPolicy
from nanovllm.kvcache.sparse.policy import PolicyContext, SparsePolicy
from nanovllm.kvcache.sparse.registry import create_policies, parse_policy
from nanovllm.kvcache.sparse.streaming import StreamingPolicy
from nanovllm.kvcache.sparse.xattn_bsa import XAttentionBSAPolicy
from nanovllm.ops import reference
from nanovllm.ops.backends import resolve_backend

CPU = create_device("cpu")
BLOCK = 16
HEADS, KV_HEADS, DIM = 4, 2, 32


class Chosen(SparsePolicy):
    """Attends to the history blocks at given places of the block table."""

    supports_prefill = True
    supports_decode = False

    def __init__(self, places):
        self.places = places

    def select_blocks(self, available_blocks, source, ctx):
        return [block for i, block in enumerate(available_blocks) if i in self.places]


class Chunk:
    """A chunk of a sequence whose keys and values lie in a cache that is poison elsewhere."""

    def __init__(self, num_history, q_len, block_table):
        self.context_len = num_history + q_len
        cache = ResidentKVCache(
            KVLayout(1, BLOCK, KV_HEADS, DIM, torch.float32), 40, CPU.torch_device
        )
        self.layer = cache.layers[0]
        self.layer.keys.fill_(float("nan"))
        self.layer.values.fill_(float("nan"))
        generator = torch.Generator().manual_seed(0)
        self.keys, self.values = torch.randn(
            2, self.context_len, KV_HEADS, DIM, generator=generator
        )
        slots = slot_index(block_table, self.context_len, BLOCK, CPU)
        self.layer.keys.flatten(0, 1)[slots] = self.keys
        self.layer.values.flatten(0, 1)[slots] = self.values
        self.segment = PrefillSegment(
            rows=slice(0, q_len),
            block_table=block_table,
            num_history_tokens=num_history,
            context_len=self.context_len,
            block_size=BLOCK,
            slots=slots,
            device=CPU,
        )
        self.ctx = PolicyContext(
            layer_id=0,
            query=torch.randn(q_len, HEADS, DIM, generator=generator),
            num_history_tokens=num_history,
            block_size=BLOCK,
            softmax_scale=DIM**-0.5,
            backend=resolve_backend("torch", CPU.torch_device, torch.float32, DIM),
        )

    def attend(self, policy):
        return policy.compute_chunked_prefill(ResidentSource(self.layer, self.segment), self.ctx)

    def truth(self, dropped=()):
        """Return dense causal attention over all tokens but those of the dropped blocks."""
        kept = [i for i in range(self.context_len) if i // BLOCK not in dropped]
        out, _ = reference.attention_with_lse(
            *(t[None].double() for t in (self.ctx.query, self.keys[kept], self.values[kept])),
            self.ctx.softmax_scale,
            True,
        )
        return out[0]


LAYOUTS = {"following": list(range(5, 15)), "scattered": [7, 3, 30, 12, 4, 39, 0, 21, 22, 9]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_history", "q_len"), [(0, 5), (16, 1), (64, 16), (75, 40), (100, 33)])
def test_full_attention(layout, num_history, q_len):
    chunk = Chunk(num_history, q_len, LAYOUTS[layout])
    assert_close(chunk.attend(FullAttentionPolicy()), chunk.truth())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("places", [{0}, {1, 3}, {0, 1, 2, 3}, set()], ids=str)
@pytest.mark.parametrize(("num_history", "q_len"), [(64, 16), (75, 40), (79, 1)])
def test_selected_blocks_and_the_chunk_are_all_that_counts(layout, places, num_history, q_len):
    """Of 75 tokens four blocks are full; the part of one that the chunk shares always counts."""
    chunk = Chunk(num_history, q_len, LAYOUTS[layout])
    out = chunk.attend(Chosen(places))
    dropped = {0, 1, 2, 3} - places
    assert_close(out, chunk.truth(dropped))
    if dropped:
        with pytest.raises(AssertionError):  # control: the dropped blocks would show
            assert_close(out, chunk.truth())


def test_the_part_of_a_block_that_the_chunk_shares_is_not_offered():
    offered = []

    class Watching(FullAttentionPolicy):
        def select_blocks(self, available_blocks, source, ctx):
            offered.append(list(available_blocks))
            return available_blocks

    Chunk(75, 10, LAYOUTS["scattered"]).attend(Watching())
    assert offered == [[7, 3, 30, 12]]


@given(
    blocks=st.lists(st.integers(0, 50), min_size=1, max_size=8, unique=True),
    last=st.integers(1, BLOCK),
)
def test_slot_index(blocks, last):
    num_tokens = (len(blocks) - 1) * BLOCK + last
    expected = [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(num_tokens)]
    slots = slot_index(blocks, num_tokens, BLOCK, CPU)
    assert torch.arange(51 * BLOCK)[slots].tolist() == expected
    follow = all(b - a == 1 for a, b in itertools.pairwise(blocks))
    assert isinstance(slots, slice) == follow


def test_policies_are_found_by_name_in_any_case():
    assert parse_policy("full") is parse_policy("Full") is SparsePolicyType.FULL
    assert parse_policy("xattn_bsa") is SparsePolicyType.XATTN_BSA
    for value in ("sparse", 7, FullAttentionPolicy, None):
        with pytest.raises(ConfigError, match="none of FULL, XATTN_BSA"):
            parse_policy(value)


def test_policies_are_made_by_the_options():
    prefill, decode = create_policies(Config(model="demo"))
    assert prefill is decode
    assert isinstance(prefill, FullAttentionPolicy)
    prefill, decode = create_policies(Config(model="demo", sparse_policy="streaming"))
    assert isinstance(prefill, StreamingPolicy)
    assert isinstance(decode, FullAttentionPolicy)  # it has no decode
    own = Chosen({1})
    prefill, decode = create_policies(Config(model="demo", sparse_policy=own))
    assert prefill is own
    assert isinstance(decode, FullAttentionPolicy)
    xattn, _ = create_policies(
        Config(
            model="demo",
            sparse_policy="XATTN_BSA",
            sparse_threshold=9,
            sparse_estimator="row",
            sparse_stride=32,
            sparse_guard=0.4,
            sparse_chunk_size=8192,
            sparse_vote_threshold=0.5,
            sparse_dense_layers=2,
            sparse_min_len=256,
        )
    )
    assert isinstance(xattn, XAttentionBSAPolicy)
    assert (xattn.threshold, xattn.estimator, xattn.stride, xattn.guard) == (0.9, "row", 32, 0.4)
    assert (xattn.chunk_size, xattn.vote_threshold) == (8192, 0.5)
    assert (xattn.dense_layers, xattn.min_len) == (2, 256)


def test_a_policy_without_a_phase_is_refused():
    class DecodeOnly(FullAttentionPolicy):
        supports_prefill = False

    with pytest.raises(ConfigError, match="sparse_policy: DecodeOnly has no prefill phase"):
        create_policies(Config(model="demo", sparse_policy=DecodeOnly()))
    with pytest.raises(ConfigError, match="decode_policy: StreamingPolicy has no decode phase"):
        create_policies(Config(model="demo", decode_policy="STREAMING"))


def test_each_estimator_has_parameters_of_its_own():
    def parameters(**options):
        named = {f"sparse_{name}": value for name, value in options.items()}
        prefill, _ = create_policies(Config(model="demo", sparse_policy="XATTN_BSA", **named))
        return prefill.threshold, prefill.stride, prefill.guard

    assert parameters() == parameters(estimator="row") == (0.85, 16, 0.5)
    assert parameters(estimator="group") == (0.95, 8, 1)
    assert parameters(threshold=0, stride=32, guard=1) == (0, 32, 1)
    with pytest.raises(ConfigError, match="estimator='mean' is none of row, group"):
        XAttentionBSAPolicy(estimator="mean")
