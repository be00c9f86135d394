"""Times one layer's sparse attention against dense attention on the same random inputs.

    python bench_attention.py                          # Llama-3.1-8B's heads, 16K to 256K
    python bench_attention.py --cases row:16 --lengths 131072 --density 0.2
    python bench_attention.py --crossover              # where sparse begins to pay

For each length and case (`estimator:stride`): dense attention over the whole prompt at once, and
estimate, select and attend, apart and as one, over the whole prompt or in chunks of queries. Random
inputs have no tiles that matter, so the threshold is set to reach the tile density that a trained
model has at that length. Nothing is timed unless the ops agree with their references.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench import machine_facts, write_record
from nanovllm.ops import xattn_reference
from nanovllm.ops.attention import flash_attn_with_lse
from nanovllm.ops.backends import (
    AttentionBackend,
    TileBackend,
    resolve_backend,
    resolve_tile_backend,
)
from nanovllm.ops.block_sparse import TILE, block_sparse_attention, num_causal_tiles
from nanovllm.ops.tile_estimate import estimate_tiles
from nanovllm.ops.tile_selection import select_tiles

GIB = 1 << 30
SHAPES = {"llama-3.1-8b": (32, 8, 128), "demo": (9, 3, 64)}  # query heads, KV heads, head_dim
# Tile density of a trained model by length, as published for XAttention.
DENSITIES = {16384: 0.48, 32768: 0.40, 65536: 0.30, 131072: 0.22, 262144: 0.15}
DENSITY_OF_SHORT = 0.53
CROSSOVER_LENGTHS = [
    *(128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
]
STEPS = ("estimate", "select", "attend")
_QUEUE_CYCLES = 30_000_000  # some 17 ms


@dataclass(frozen=True, kw_only=True)
class Case:
    """How tiles are estimated and chosen."""

    estimator: str
    stride: int
    guard: bool

    @classmethod
    def parse(cls, text: str, guard: bool) -> "Case":
        estimator, _, stride = text.partition(":")
        return cls(estimator=estimator, stride=int(stride), guard=guard and estimator == "row")

    def __str__(self) -> str:
        return f"{self.estimator}:{self.stride}"

    def gamma(self, threshold: float) -> float | None:
        """Return the peak above which the guard keeps a tile."""
        return max(0.1, 1 - 0.6 * threshold) if self.guard else None


class Layer:
    """One layer's queries, keys and values, and its sparse attention in chunks of queries."""

    def __init__(
        self, shape: tuple[int, int, int], length: int, chunk: int, device: torch.device
    ) -> None:
        num_q_heads, num_kv_heads, head_dim = shape
        generator = torch.Generator(device).manual_seed(length)
        self.query, self.key, self.value = (
            torch.randn(
                (length, heads, head_dim), generator=generator, device=device, dtype=torch.bfloat16
            )
            for heads in (num_q_heads, num_kv_heads, num_kv_heads)
        )
        self.scale = head_dim**-0.5
        borders = [*range(0, length, chunk or length), length]
        self.chunks = list(pairwise(borders))
        self.masses: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.tiles: list[torch.Tensor] = []

    def dense(self, backend: AttentionBackend) -> torch.Tensor:
        """Attend to everything, the whole prompt at once."""
        qkv = (tensor[None] for tensor in (self.query, self.key, self.value))
        return flash_attn_with_lse(*qkv, self.scale, causal=True, backend=backend)[0][0]

    def estimate(self, case: Case) -> None:
        self.masses = [self._estimate(case, *chunk) for chunk in self.chunks]

    def select(self, case: Case, threshold: float) -> None:
        pairs = zip(self.chunks, self.masses, strict=True)
        self.tiles = [self._select(case, threshold, start, *found) for (start, _), found in pairs]

    def attend(self, backend: TileBackend) -> list[torch.Tensor]:
        pairs = zip(self.chunks, self.tiles, strict=True)
        return [self._attend(backend, tiles, *chunk) for chunk, tiles in pairs]

    def sparse(self, case: Case, threshold: float, backend: TileBackend) -> None:
        """Do all three for one chunk after the other, as the engine does."""
        for start, stop in self.chunks:
            found = self._estimate(case, start, stop)
            tiles = self._select(case, threshold, start, *found)
            self._attend(backend, tiles, start, stop)

    def tile_density(self) -> float:
        """Return the share of the causal tiles that are kept. Synchronises."""
        kept = sum(int(tiles.sum()) for tiles in self.tiles)
        length, heads, _ = self.query.shape
        return kept / (heads * num_causal_tiles(length, 0))

    def _estimate(
        self, case: Case, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return estimate_tiles(
            self.query[start:stop],
            self.key[:stop],
            start,
            case.estimator,
            case.stride,
            self.scale,
            with_peaks=case.guard,
        )

    def _select(
        self,
        case: Case,
        threshold: float,
        start: int,
        masses: torch.Tensor,
        peaks: torch.Tensor | None,
    ) -> torch.Tensor:
        return select_tiles(masses, threshold, start // TILE, peaks, case.gamma(threshold))

    def _attend(
        self, backend: TileBackend, tiles: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        query, key, value = self.query[start:stop], self.key[:stop], self.value[:stop]
        return block_sparse_attention(query, key, value, tiles, start, 0, self.scale, backend)[0]


def main() -> None:
    args = _parse_args()
    device, shape = torch.device(args.device), SHAPES[args.shape]
    dense_backend = resolve_backend("auto", device, torch.bfloat16, shape[2])
    backend = resolve_tile_backend(args.tile_backend, device, torch.bfloat16, shape[2])
    cases = [Case.parse(text, args.guard == "on") for text in args.cases]
    check_ops(shape, cases, device, dense_backend, backend)
    facts = _facts(args, device, dense_backend, backend)
    print(facts)
    lengths = CROSSOVER_LENGTHS if args.crossover else args.lengths
    rows = []
    for length in lengths:
        if shortage := _shortage(shape, length, device):
            print(f"{length} skipped: {shortage}")
            continue
        layer = Layer(shape, length, args.chunk, device)
        for case in cases:
            row = _time_case(layer, case, dense_backend, backend, args)
            write_record(args.json, facts | row)
            rows.append(row)
            print(_line(row), flush=True)
        del layer
    if args.crossover:
        _print_crossover(rows, cases)
    else:
        _print_table(rows)


def check_ops(
    shape: tuple[int, int, int],
    cases: list[Case],
    device: torch.device,
    dense_backend: AttentionBackend,
    backend: TileBackend,
) -> None:
    """Leave the program unless the ops are right at a small length, the last tile partial."""
    layer = Layer(shape, 1100, 512, device)
    length = layer.query.shape[0]
    layer.tiles = [
        torch.ones(shape[0], -(-(b - a) // TILE), -(-b // TILE), dtype=torch.bool, device=device)
        for a, b in layer.chunks
    ]
    dense = layer.dense(dense_backend)
    _assert_close("sparse attention over all tiles", torch.cat(layer.attend(backend)), dense, 6e-3)
    heads_first = [tensor.float().transpose(0, 1) for tensor in (layer.query, layer.key)]
    for case in cases:
        layer.estimate(case)
        reference = getattr(xattn_reference, f"tile_masses_{case.estimator}")
        masses, peaks = reference(*heads_first, 0, case.stride)
        ours = torch.zeros_like(masses), torch.zeros_like(peaks)
        for (start, _), found in zip(layer.chunks, layer.masses, strict=True):
            for whole, part in zip(ours, found, strict=True):
                if part is not None:
                    rows = slice(start // TILE, start // TILE + part.shape[1])
                    whole[:, rows, : part.shape[2]] = part
        _assert_close(f"masses of {case}", ours[0], masses, 2e-3)
        if case.guard:
            _assert_close(f"peaks of {case}", ours[1], peaks, 5e-3)
    print(f"ops agree with their references at {length} tokens")


def _assert_close(name: str, ours: torch.Tensor, truth: torch.Tensor, tolerance: float) -> None:
    ours, truth = ours.double(), truth.double()
    error = ((ours - truth).square().mean() / truth.square().mean()).sqrt().item()
    if not error <= tolerance:
        raise SystemExit(f"not timed: {name} is off by {error:.1e}, allowed {tolerance:.0e}")


def published_density(length: int) -> float:
    """Return a trained model's tile density, between known lengths by the log of the length."""
    known = sorted(DENSITIES.items())
    if length < known[0][0]:
        return DENSITY_OF_SHORT
    for (a, density_a), (b, density_b) in pairwise(known):
        if length <= b:
            share = math.log(length / a) / math.log(b / a)
            return density_a + share * (density_b - density_a)
    return known[-1][1]


def find_threshold(layer: Layer, case: Case, density: float) -> float:
    """Return the least threshold, to 1e-4, whose tiles of the layer's masses reach a density."""
    low, high = 0.0, 1.0
    layer.select(case, low)
    if layer.tile_density() >= density:  # the forced tiles alone
        return low
    while high - low > 1e-4:
        middle = (low + high) / 2
        layer.select(case, middle)
        low, high = (middle, high) if layer.tile_density() < density else (low, middle)
    return high


def _time_case(
    layer: Layer,
    case: Case,
    dense_backend: AttentionBackend,
    backend: TileBackend,
    args: argparse.Namespace,
) -> dict[str, Any]:
    length = len(layer.query)
    wanted = args.density or published_density(length)
    layer.estimate(case)
    threshold = find_threshold(layer, case, wanted)
    layer.select(case, threshold)
    density = layer.tile_density()
    runs: dict[str, Callable[[], object]] = {
        "dense": lambda: layer.dense(dense_backend),
        "estimate": lambda: layer.estimate(case),
        "select": lambda: layer.select(case, threshold),
        "attend": lambda: layer.attend(backend),
        "total": lambda: layer.sparse(case, threshold, backend),
    }
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(args.repeats + 2):  # the first turns warm up
        for name, run in runs.items():
            elapsed = _elapsed_ms(run, layer.query.device)
            if turn > 1:
                samples[name].append(round(elapsed, 4))
    layer.masses, layer.tiles = [], []
    return {
        "length": length,
        "case": str(case),
        "density_wanted": round(wanted, 4),
        "tile_density": round(density, 4),
        "threshold": round(threshold, 4),
        "gamma": case.gamma(threshold),
        "unit": "ms",
        "samples": samples,
    } | {name: statistics.median(values) for name, values in samples.items()}


def _elapsed_ms(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # As behind a model's earlier layers: kernels wait for the device, not for their launch.
    torch.cuda._sleep(_QUEUE_CYCLES)
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def _shortage(shape: tuple[int, int, int], length: int, device: torch.device) -> str | None:
    """Return how much memory a length needs if that is more than there is."""
    if device.type != "cuda":
        return None
    num_q_heads, num_kv_heads, head_dim = shape
    tokens = length * head_dim * 2 * (3 * num_q_heads + 2 * num_kv_heads)  # q, two outputs, k, v
    # Masses and peaks in fp32, tiles, lists in int32; 8 GiB for a chunk's scratch.
    needed = tokens + 13 * num_q_heads * (length // TILE + 1) ** 2 + 8 * GIB
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if needed <= free:
        return None
    return f"needs {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"


def _facts(
    args: argparse.Namespace,
    device: torch.device,
    dense_backend: AttentionBackend,
    backend: TileBackend,
) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else device.type
    engine = SimpleNamespace(device=SimpleNamespace(name=name), backend_name=dense_backend.name)
    return machine_facts(SimpleNamespace(engine=engine)) | {
        "tile_attention": backend.name,
        "shape": args.shape,
        "chunk": args.chunk,
    }


def _line(row: dict[str, Any]) -> str:
    gamma = "" if row["gamma"] is None else f"/{row['gamma']:.2f}"
    steps = "".join(f"{row[name]:10.3f}" for name in ("dense", *STEPS, "total"))
    choice = (row["estimate"] + row["select"]) / row["dense"]
    return (
        f"{row['length']:8} {row['case']:9}{row['tile_density']:8.3f} "
        f"{row['threshold']:.3f}{gamma:5}{steps}{row['dense'] / row['total']:9.2f}x{choice:8.3f}"
    )


def _print_table(rows: list[dict[str, Any]]) -> None:
    header = "".join(f"{name:>10}" for name in ("dense", *STEPS, "total"))
    print(f"\n{'tokens':>8} {'case':9}{'density':>8} {'tau/gamma':10}{header}  speed-up  choice")
    print("in ms; choice is estimate and select as a share of dense")
    for row in rows:
        print(_line(row))


def _print_crossover(rows: list[dict[str, Any]], cases: list[Case]) -> None:
    """Print dense over sparse by length; sparse pays from the length where it exceeds 1."""
    print(f"\n{'tokens':>8}{'dense ms':>10}" + "".join(f"{case!s:>18}" for case in cases))
    print("sparse in ms, and how many times as fast as dense it is")
    for length in dict.fromkeys(row["length"] for row in rows):
        of_length = [row for row in rows if row["length"] == length]
        dense = statistics.median(row["dense"] for row in of_length)
        totals = "".join(f"{r['total']:10.3f}{r['dense'] / r['total']:7.2f}x" for r in of_length)
        print(f"{length:8}{dense:10.3f}{totals}")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    add("--lengths", type=int, nargs="+", default=list(DENSITIES))
    add("--cases", nargs="+", default=["group:8", "group:16", "row:16", "row:32"])
    add("--guard", default="on", choices=["on", "off"], help="of the row estimator")
    add("--density", type=float, help="tile density, instead of the published one")
    add("--chunk", type=int, default=0, help="queries at a time, of 128; 0 for all at once")
    add("--crossover", action="store_true", help="lengths from 128 to 32768")
    add("--tile-backend", default="auto", help="fa4, flex or torch")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--repeats", type=int, default=7)
    add("--json", type=Path, help="file to append JSON lines to")
    args = parser.parse_args()
    if args.chunk < 0 or args.chunk % TILE:
        parser.error(f"--chunk {args.chunk} is no multiple of {TILE}")
    return args


if __name__ == "__main__":
    main()
