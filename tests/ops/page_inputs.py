"""What the tests of pages share: a paged cache with the index of its keys, by loops."""

import torch
from op_inputs import CPU, NAN, randn

from nanovllm.ops.page_index import PageIndex, num_words

PAGE_SIZE, BLOCK_SIZE = 8, 16
SCALE = 0.1
GARBAGE = 2**31 - 1  # an entry of a table that would end the process if it were read through
ESTIMATORS = ["bounds", "codes"]


def ints(values, device=CPU):
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_same(ours, truth):
    """NaN is the same as NaN."""
    torch.testing.assert_close(ours, truth.to(ours.device), rtol=0, atol=0, equal_nan=True)


def codes_of(keys):
    """Return in which quarter of its page's bounds each value of a page lies, `[n, heads, dim]`."""
    keys = keys.double()
    low, high = keys.amin(0), keys.amax(0)
    quarter = ((keys - low) / (high - low) * 4).floor().clamp(max=3)
    return torch.where(high > low, quarter, 3).int()


def unpack(codes, dim):
    """Return the codes of `[..., num_words]` one by one."""
    shifts = 2 * torch.arange(8, device=codes.device)[:, None]
    return (codes[..., None, :] >> shifts & 3).flatten(-2)[..., :dim]


class Cache:
    """A paged cache of keys, the index of its pages, and what loops say of them."""

    def __init__(self, num_blocks, heads=2, dim=16, dtype=torch.float32, device=CPU):
        num_pages = num_blocks * BLOCK_SIZE // PAGE_SIZE
        self.keys = torch.full((num_blocks, BLOCK_SIZE, heads, dim), NAN, dtype=dtype)
        self.keys = self.keys.to(device)
        self.truth = torch.full((num_pages, heads, 2, dim), NAN, dtype=dtype)
        codes = torch.full((num_pages, heads, PAGE_SIZE, num_words(dim)), -1, dtype=torch.int16)
        self.index = PageIndex(self.truth.to(device, copy=True), codes.to(device))

    @property
    def bounds(self):
        return self.index.bounds

    def indexed_by(self, estimator):
        return self.index if estimator == "codes" else PageIndex(self.bounds)

    def store(self, module, keys, slots, page_size=PAGE_SIZE):
        where = ints(slots, self.keys.device)
        self.keys[where // BLOCK_SIZE, where % BLOCK_SIZE] = keys.to(self.keys)
        module.update_page_index(self.index, self.keys, where, where, page_size)
        for key, slot in zip(keys.to(self.truth), slots, strict=True):
            low, high = self.truth[slot // page_size].unbind(1)
            if slot % page_size == 0:
                low[:], high[:] = key, key
            else:
                low[:], high[:] = torch.minimum(low, key), torch.maximum(high, key)
        assert_same(self.bounds, self.truth)
        newest = {slot // page_size: slot % page_size for slot in slots}
        for page, offset in newest.items():
            mine = self.keys.flatten(0, 1)[page * page_size :][: offset + 1].cpu()
            if not mine.isnan().any():
                packed = self.index.codes[page, :, : offset + 1].transpose(0, 1).cpu()
                assert torch.equal(unpack(packed, mine.shape[2]), codes_of(mine))


class Pages:
    """Random indices of sequences of given lengths; what belongs to none of them is poison."""

    def __init__(self, lengths, heads=4, kv_heads=2, dim=64, dtype=torch.float32):
        self.lengths = lengths
        per_block = BLOCK_SIZE // PAGE_SIZE
        num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randperm(sum(num_blocks) + 1, generator=generator).tolist()
        num_pages = len(blocks) * per_block
        self.bounds = torch.full((num_pages, kv_heads, 2, dim), NAN, dtype=dtype)
        shape = num_pages, kv_heads, PAGE_SIZE, num_words(dim)
        self.codes = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
        self.tables = torch.full((len(lengths), max(num_blocks) + 1), GARBAGE, dtype=torch.int32)
        self.query = randn(len(lengths), heads, dim, dtype=dtype, device=CPU)
        self.physical = []
        for i, (length, count) in enumerate(zip(lengths, num_blocks, strict=True)):
            mine, blocks = blocks[:count], blocks[count:]
            self.tables[i, :count] = ints(mine)
            pages = [block * per_block + j for block in mine for j in range(per_block)]
            pages = pages[: -(-length // PAGE_SIZE)]
            ends = randn(len(pages), kv_heads, 2, dim, seed=1 + i, device=CPU)
            self.bounds[pages] = ends.sort(dim=2).values.to(dtype)
            self.physical.append(pages)

    def index(self, estimator, device=CPU):
        codes = self.codes.to(device) if estimator == "codes" else None
        return PageIndex(self.bounds.to(device), codes)

    def score(self, implementation, estimator="bounds"):
        module, device = implementation
        inputs = (x.to(device) for x in (self.tables, ints(self.lengths)))
        index = self.index(estimator, device)
        scores = module.score_pages(
            self.query.to(device), index, *inputs, SCALE, PAGE_SIZE, BLOCK_SIZE
        )
        return scores.cpu()

    def truth(self, i, head, group, estimator):
        """Return the scores of a sequence and KV head from their definition, in fp64.

        `[group, pages]`, of all pages but the newest.
        """
        queries = self.query[i].double()[head * group : (head + 1) * group]
        rows = []
        for page in self.physical[i][:-1]:
            low, high = self.bounds[page, head].double()
            if estimator == "bounds":
                rows.append([SCALE * torch.maximum(q * low, q * high).sum() for q in queries])
                continue
            codes = unpack(self.codes[page, head], len(low))
            keys = low + (codes + 0.5) / 4 * (high - low)
            rows.append((SCALE * queries @ keys.mT).logsumexp(1).tolist())
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, group).mT


def choose(modules, query, index, tables, lengths, num_pages):
    """Score pages and choose among them."""
    scoring, choosing = modules
    scores = scoring.score_pages(query, index, tables, lengths, SCALE, PAGE_SIZE, BLOCK_SIZE)
    return choosing.top_pages(scores, lengths, PAGE_SIZE, num_pages, 1, tables, BLOCK_SIZE)
