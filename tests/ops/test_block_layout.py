"""Conversion between token-major tensors and head-major blocks: a copy, bit by bit."""

import pytest
import torch
from op_inputs import CPU, DEVICE, DTYPES

from nanovllm.ops import block_layout, reference
from nanovllm.ops.kernels import block_layout as kernels

IMPLEMENTATIONS = {"torch": (block_layout, CPU), "kernel": (kernels, DEVICE)}
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
HEADS = 3


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request):
    return IMPLEMENTATIONS[request.param]


def random_bits(*shape, dtype, device, seed=0):
    """Return numbers of all kinds: NaN of every payload, infinities and subnormals too."""
    limits = torch.iinfo(BITS[dtype])
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(limits.min, limits.max, shape, dtype=BITS[dtype], generator=generator)
    return bits.to(device).view(dtype)


class Buffers:
    """Tokens and blocks as views of wider memory, random all over."""

    def __init__(self, num_blocks, block_size, dim, views, dtype, device):
        options = {"dtype": dtype, "device": device}
        num_tokens = num_blocks * block_size
        if views:
            # Blocks of keys beside those of values; tokens amid others, beside other heads.
            self.block_memory = random_bits(num_blocks, 2, HEADS, block_size, dim, **options)
            self.token_memory = random_bits(num_tokens + 5, HEADS + 4, dim, seed=1, **options)
            self.blocks = self.block_memory[:, 1]
            self.tokens = self.token_memory[3 : 3 + num_tokens, 2 : 2 + HEADS]
        else:
            self.blocks = self.block_memory = random_bits(
                num_blocks, HEADS, block_size, dim, **options
            )
            self.tokens = self.token_memory = random_bits(num_tokens, HEADS, dim, seed=1, **options)

    def bits(self):
        """Return copies of all that the tokens' memory and the blocks' hold."""
        memories = self.token_memory, self.block_memory
        return [memory.view(BITS[memory.dtype]).clone() for memory in memories]

    def view_blocks(self):
        """See the tokens as blocks."""
        return reference.pack_blocks(self.tokens, self.blocks.shape[2])


SHAPES = [(5, 16, 64), (3, 48, 80), (2, 80, 96), (1, 256, 128), (4, 16, 256), (1, 16, 17)]


def test_reference_by_rows():
    tokens = torch.arange(6 * 3 * 2).view(6, 3, 2)
    blocks = reference.pack_blocks(tokens, 2)
    assert blocks.shape == (3, 3, 2, 2)
    for i in range(6):
        for head in range(3):
            assert torch.equal(blocks[i // 2, head, i % 2], tokens[i, head])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("views", [False, True], ids=["whole", "views"])
@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_copies_all_and_nothing_else(ops, direction, shape, views, dtype):
    """Every bit of the target becomes the source's; the memory around it stays as it is."""
    module, device = ops
    ours, truth = (Buffers(*shape, views, dtype, device) for _ in range(2))
    before = ours.bits()
    if direction == "pack":
        assert module.pack_blocks(ours.tokens, ours.blocks) is None
        truth.blocks.view(BITS[dtype]).copy_(truth.view_blocks().view(BITS[dtype]))
    else:
        assert module.unpack_blocks(ours.blocks, ours.tokens) is None
        truth.view_blocks().view(BITS[dtype]).copy_(truth.blocks.view(BITS[dtype]))
    source, target = (0, 1) if direction == "pack" else (1, 0)
    after = ours.bits()
    assert torch.equal(after[source], before[source])
    assert torch.equal(after[target], truth.bits()[target])
    assert not torch.equal(after[target], before[target])


@pytest.mark.parametrize("axis", range(3), ids=["blocks", "heads", "tokens"])
def test_offsets_beyond_32_bits(ops, axis):
    """Three of one kind lie 2^30 elements apart; on a CPU only pages that are written are taken."""
    module, device = ops
    pool = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    shape, strides = [1, 1, 1, 64], [64, 64, 64, 1]
    shape[axis], strides[axis] = 3, 2**30
    blocks = pool.as_strided(shape, strides)
    num_blocks, num_heads, block_size, _ = shape
    tokens = random_bits(num_blocks * block_size, num_heads, 64, dtype=pool.dtype, device=device)
    back = torch.zeros_like(tokens)
    module.pack_blocks(tokens, blocks)
    assert torch.equal(pool[-64:].view(torch.int16), tokens.flatten()[-64:].view(torch.int16))
    module.unpack_blocks(blocks, back)
    assert torch.equal(back.view(torch.int16), tokens.view(torch.int16))


def test_no_blocks(ops, monkeypatch):
    """Nothing is launched."""
    monkeypatch.setattr(kernels, "_copy_tokens_kernel", None)
    module, device = ops
    tokens, blocks = torch.empty(0, 3, 64, device=device), torch.empty(0, 3, 16, 64, device=device)
    module.pack_blocks(tokens, blocks)
    module.unpack_blocks(blocks, tokens)


@pytest.mark.parametrize(
    ("tokens", "blocks", "reason"),
    [
        (torch.empty(33, 3, 64), torch.empty(2, 3, 16, 64), r"\[33, 3, 64\] do not fit"),
        (torch.empty(32, 3, 64), torch.empty(2, 2, 16, 64), r"hold \[32, 2, 64\]"),
        (torch.empty(32, 3, 64), torch.empty(2, 3, 16, 32), r"hold \[32, 3, 32\]"),
        (torch.empty(32, 192), torch.empty(2, 3, 16, 64), "2 axes and blocks of 4"),
        (torch.empty(32, 3, 64), torch.empty(96, 16, 64), "3 axes and blocks of 3"),
        (torch.empty(32, 3, 64).half(), torch.empty(2, 3, 16, 64), "float16 and blocks of"),
        (torch.empty(32, 3, 64), torch.empty(2, 3, 64, 16).mT, r"1 \(tokens\) and 16 \(blocks\)"),
        (torch.empty(32, 64, 3).mT, torch.empty(2, 3, 16, 64), r"3 \(tokens\) and 1 \(blocks\)"),
    ],
)
def test_what_does_not_fit_is_refused(tokens, blocks, reason):
    for convert in (
        lambda: block_layout.pack_blocks(tokens, blocks),
        lambda: block_layout.unpack_blocks(blocks, tokens),
    ):
        with pytest.raises(ValueError, match=reason):
            convert()
