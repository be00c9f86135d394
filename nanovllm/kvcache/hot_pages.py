"""Pages that decode used lately, on the device while the KV cache is in host memory."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from nanovllm.device import Device, Event, Span, Stream
from nanovllm.errors import CapacityError
from nanovllm.kvcache.host_pool import HostPool
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.page_budget import PageBudget
from nanovllm.kvcache.paged_layer import LocatedPages, PagedLayer
from nanovllm.ops.hot_pages import HostBlocks, HotState, fetch_pages, place_pages
from nanovllm.ops.page_index import update_page_index
from nanovllm.ops.pages import top_pages


class HotPages:
    """Device memory for some pages of a few sequences, and where the others lie.

    A sequence that runs has a row. Every row, layer and KV head has slots of its own, each for one
    page of one head: hot slots, which pages from host memory pass through, least recently used
    first; and slots for the tail, the sequence's unfinished block, which is on the device only. The
    host reads nothing of this: what is here, what has to be fetched and where it goes is decided by
    kernels, so that a step can be a CUDA graph.

    Args:
        device: the device.
        layout: shape of the KV cache.
        num_host_blocks: KV blocks that host memory may hold.
        max_blocks: most KV blocks of a sequence.
        pages: how a context is divided into pages.
        num_rows: sequences that may run at once.
        num_hot: hot slots of each row, layer and KV head; at least the pages of a step.
        keeps: whether pages stay from one step to the next.
    """

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        num_host_blocks: int,
        max_blocks: int,
        pages: PageBudget,
        num_rows: int,
        num_hot: int,
        keeps: bool = True,
    ) -> None:
        self.page_size = page_size = pages.page_size
        self.block_size = layout.block_size
        self._device = device
        self._layout = layout
        self._keeps = keeps
        place = device.torch_device
        num_tail = layout.block_size // page_size
        rows = num_rows, layout.num_layers, layout.num_kv_heads
        shape = (2, *rows, num_hot + num_tail, page_size, layout.head_dim)
        data = torch.empty(shape, dtype=layout.dtype, device=place)
        # A slot holds one head, and every head finds its own there.
        self.keys, self.values = (
            x.flatten(0, 3)[:, :, None].expand(-1, -1, layout.num_kv_heads, -1) for x in data
        )
        self.tails = data[:, :, :, :, num_hot:].flatten(4, 5).transpose(3, 4)
        """Keys and values of the unfinished block of every row and layer,
        `[2, num_rows, num_layers, block_size, num_kv_heads, head_dim]`."""
        self.first_tail_slots = torch.arange(
            0, num_rows * layout.block_size, layout.block_size, dtype=torch.int32, device=place
        )
        """Where each row's tail begins, as a layer's tails are a cache of `num_rows` blocks."""
        self.scrap_block = num_host_blocks
        """A block that lies nowhere, for rows of no sequence: only its index is there."""
        index = layout.empty_page_index(num_host_blocks + 1, pages, place)
        self.index = index.layers()
        """Of each layer, what is known of the keys of all pages that host memory may hold."""
        self.state = HotState.empty(*rows, num_hot, max_blocks * num_tail, place)
        self._state_ahead = replace(self.state, counts=torch.zeros_like(self.state.counts))
        # For short kernels, beside large ones of the compute stream.
        self._fetch_stream = device.new_stream("fetch", is_urgent=True)
        self._index_stream = device.new_stream("index", is_urgent=True)
        # What runs there for the layer to come, until the compute stream has waited for it.
        self._placed: Event | None = None
        self._fetched: Event | None = None
        self._noted: Event | None = None
        self._guess: torch.Tensor | None = None
        self.clock = torch.zeros(1, dtype=torch.int32, device=place)
        """The number of the step."""
        self._addresses = torch.zeros(
            layout.num_layers, num_rows, max_blocks, dtype=torch.int64, device=place
        )
        # Of each layer and row.
        self._blocks: list[list[list[torch.Tensor]]] = [
            [[] for _ in range(num_rows)] for _ in range(layout.num_layers)
        ]
        self.num_bytes = data.nbytes - self.tails.nbytes + index.num_bytes

    @property
    def num_rows(self) -> int:
        """How many sequences may run at once."""
        return len(self.first_tail_slots)

    def num_host_blocks(self, row: int) -> int:
        """Return how many of a sequence's blocks are known to lie in host memory."""
        return len(self._blocks[0][row])

    def begin_sequence(self, row: int) -> None:
        """Forget a row's pages: those of another sequence, or of this one in other blocks."""
        self.state.forget(slice(row, row + 1))
        for rows in self._blocks:
            rows[row].clear()

    def begin_step(self) -> None:
        """Let the pages of the steps before be older than those of the next."""
        self.clock += 1
        if not self._keeps:
            self.state.forget()

    def add_host_blocks(self, row: int, pool: HostPool, block_ids: Seq[int]) -> None:
        """Say where the next of a sequence's blocks lie in host memory.

        Waits for memory that is still being made.

        Args:
            row: the sequence's.
            pool: the host's blocks.
            block_ids: the blocks after those that are known, in the order of the sequence.

        Raises:
            CapacityError: some host memory is not pinned, where no kernel can read it.
        """
        first = self.num_host_blocks(row)
        of_layers = [rows[row] for rows in self._blocks]
        for layer_id, blocks in enumerate(of_layers):
            blocks += [pool.blocks(layer_id, block_id)[0] for block_id in block_ids]
        if not pool.all_pinned:
            raise CapacityError(
                "decode_policy reads host memory from kernels, and the system refused to pin some "
                "of it. Raise the limit of locked memory (ulimit -l), lower cpu_memory_gb, or "
                "decode densely"
            )
        places = [[block.data_ptr() for block in blocks[first:]] for blocks in of_layers]
        target = self._addresses[:, row, first : first + len(block_ids)]
        target.copy_(self._device.upload(places, torch.int64))

    def note(
        self,
        layer_id: int,
        key_cache: torch.Tensor,
        key_slots: torch.Tensor,
        cache_slots: torch.Tensor,
    ) -> None:
        """Let the index hold for new keys; see `ops.page_index.update_page_index`."""
        self._device.touch(writes=Span("page index", layer_id, 1))
        update_page_index(self.index[layer_id], key_cache, key_slots, cache_slots, self.page_size)

    @contextmanager
    def beside_scores(self, layer_id: int) -> Iterator[None]:
        """Let kernels that note the newest page of each sequence run while others are scored."""
        with self._beside_compute(self._index_stream, layer_id):
            yield
        self._noted = self._index_stream.record()

    @contextmanager
    def ahead_of(self, layer_id: int, guess: torch.Tensor) -> Iterator[None]:
        """Let kernels that locate a layer's pages ahead run beside those of the compute stream.

        Args:
            layer_id: which.
            guess: a tensor of the compute stream that they use.
        """
        self._guess = guess
        with self._beside_compute(self._fetch_stream, layer_id):
            yield

    @contextmanager
    def _beside_compute(self, stream: Stream, layer_id: int) -> Iterator[None]:
        """Enter a stream, for what comes after all that the compute stream has been given so far.

        Both may read a layer's index from here on, but for the newest pages.
        """
        self._device.touch(reads=Span("page index", layer_id, 1))
        stream.wait(self._device.compute_stream.record())
        with stream.entered():
            yield

    def _catch_up(self, event: Event | None) -> None:
        """Let the compute stream go on after an event beside it, if there is one."""
        if event is not None:
            self._device.compute_stream.wait(event)

    def layer(
        self,
        layer_id: int,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        is_ahead: bool = False,
    ) -> PagedLayer:
        """Return a layer as a decode step sees it.

        Args:
            layer_id: which.
            block_tables, context_lens: as its attributes.
            is_ahead: whether pages are located before it is known that they are wanted.
        """
        return _HotLayer(self, layer_id, block_tables, context_lens, is_ahead)

    def bring(
        self,
        layer_id: int,
        pages: torch.Tensor,
        lens: torch.Tensor,
        context_lens: torch.Tensor,
        is_ahead: bool,
    ) -> torch.Tensor:
        """Give chosen pages of a layer their slots, and fetch those that are not there.

        Args:
            layer_id: which.
            pages, lens, context_lens: see `ops.hot_pages.place_pages`.
            is_ahead: see `layer`.

        Returns:
            The number of each page's slot, int32 like `pages`.
        """
        state = self._state_ahead if is_ahead else self.state
        sizes = self.page_size, self.block_size
        if not is_ahead:
            self._catch_up(self._placed)
            self._placed = self._guess = None
        self._device.touch(writes=Span("page places", layer_id, 1))
        tables, fetch = place_pages(pages, lens, context_lens, state, layer_id, self.clock, *sizes)
        if is_ahead:
            self._placed = self._fetch_stream.record()
        else:
            self._catch_up(self._fetched)
            self._catch_up(self._noted)
            self._fetched = self._noted = None
        self._device.touch(writes=Span("hot", layer_id, 1))
        host = HostBlocks(self._addresses[layer_id], self._blocks[layer_id])
        fetch_pages(self.keys[:, :, 0], self.values[:, :, 0], pages, fetch, host, *sizes)
        if is_ahead:
            self._fetched = self._fetch_stream.record()
        return tables

    def stats(self) -> dict[str, Any]:
        """Return how many pages of a KV head steps wanted from host memory. Waits for the device.

        Keys: `pages_wanted`; `pages_fetched`, of which `pages_fetched_ahead` before it was known
        that they are wanted; `bytes_fetched`; and `hit_rate`, the share of those wanted that were
        here by then; 0 where nothing was wanted.
        """
        wanted, missing = self.state.counts.tolist()
        ahead = int(self._state_ahead.counts[1])
        page_bytes = 2 * self.page_size * self._layout.head_dim * self._layout.dtype.itemsize
        return {
            "pages_wanted": wanted,
            "pages_fetched": missing + ahead,
            "pages_fetched_ahead": ahead,
            "bytes_fetched": (missing + ahead) * page_bytes,
            "hit_rate": 1 - missing / wanted if wanted else 0.0,
        }

    def reset_stats(self) -> None:
        """Let `stats` count anew."""
        for state in (self.state, self._state_ahead):
            state.counts.zero_()


class _HotLayer(PagedLayer):
    """A layer whose chosen pages are fetched from host memory, but for those on the device."""

    def __init__(
        self,
        hot: HotPages,
        layer_id: int,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        is_ahead: bool,
    ) -> None:
        self.index = hot.index[layer_id]
        self.block_tables, self.context_lens = block_tables, context_lens
        self.block_size = hot.block_size
        self._hot, self._layer_id, self._is_ahead = hot, layer_id, is_ahead

    def locate(self, scores: torch.Tensor, budget: PageBudget) -> LocatedPages:
        hot = self._hot
        pages, lens = top_pages(
            scores,
            self.context_lens,
            budget.page_size,
            min(budget.num_pages, scores.shape[3]),
            budget.num_recent,
            num_dense=budget.num_dense,
        )
        tables = hot.bring(self._layer_id, pages, lens, self.context_lens, self._is_ahead)
        return LocatedPages(hot.keys, hot.values, tables, lens)
