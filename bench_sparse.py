"""Times a model's prefill with sparse attention against its own dense one, in the same run.

    python bench_sparse.py                                      # Llama-3.1-8B shape, 128K
    python bench_sparse.py --lengths 32768 65536 --cases row:16:guard

Dense attention runs with the KV cache on the device; XATTN_BSA with the cache there, and in host
memory in both prefill orders. A case is an estimator, its stride and whether it is guarded. Random
weights attend to nothing in particular, so each case's threshold is set to the tile density that is
published for an 8B model at that length. What the tiles are worth is told by tests/test_ruler.py.
"""

import argparse
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench import machine_facts, model_directory, write_record
from bench_attention import published_density
from bench_offload import GIB, Engine
from nanovllm.kvcache.sparse.xattn_bsa import XAttentionBSAPolicy
from nanovllm.ops.block_sparse import TILE, num_causal_tiles
from nanovllm.ops.tile_selection import select_tiles

THRESHOLDS = [0.05 * i for i in range(1, 20)]


class Adjustable(XAttentionBSAPolicy):
    """A policy whose options change between requests, and that tells what thresholds would keep."""

    def __init__(self) -> None:
        super().__init__()
        self._is_surveying = False
        self._kept: list[list[torch.Tensor]] = []
        self._causal = 0

    def choose(self, case: str, threshold: float) -> None:
        """Take the options of a case."""
        estimator, stride, *guard = case.split(":")
        self.estimator, self.stride, self.threshold = estimator, int(stride), threshold
        self.guard = self._gamma(threshold) if guard else 1.0

    def survey(self, case: str, engine: Engine, prompt: list[int]) -> list[float]:
        """Return the tile density of each threshold, over every eighth layer."""
        self.choose(case, THRESHOLDS[0])
        self._kept, self._causal, self._is_surveying = [], 0, True
        engine.generate(prompt)
        self._is_surveying = False
        sums = torch.stack([torch.stack(kept) for kept in self._kept]).sum(0)
        return (sums / self._causal).tolist()

    def keep(
        self, masses: torch.Tensor, peaks: torch.Tensor | None, q_tile0: int, layer_id: int
    ) -> torch.Tensor:
        if self._is_surveying and layer_id % 8 == 0:
            gammas = [self._gamma(t) if peaks is not None else None for t in THRESHOLDS]
            choices = [
                select_tiles(masses, threshold, q_tile0, peaks, gamma)
                for threshold, gamma in zip(THRESHOLDS, gammas, strict=True)
            ]
            self._kept.append([tiles.sum() for tiles in choices])
            num_heads, count, _ = masses.shape
            self._causal += num_heads * num_causal_tiles(count * TILE, q_tile0 * TILE)
        return super().keep(masses, peaks, q_tile0, layer_id)

    @staticmethod
    def _gamma(threshold: float) -> float:
        return max(0.1, 1 - 0.6 * threshold)


def main() -> None:
    args = _parse_args()
    longest = max(args.lengths) + 1024
    policy = Adjustable()
    # No more blocks than the longest prompt needs: the warm-up turn makes all of them.
    host = {"enable_offload": True, "num_kvcache_blocks": -(-longest // 1024)}
    device = {"num_kvcache_blocks": -(-longest // 256), "max_num_seqs": 8}
    sparse = {"sparse_policy": policy}
    places = {
        "resident": device | sparse,
        "layer-major": host | sparse | {"prefill_order": "layer"},
        "chunk-major": host | sparse | {"prefill_order": "chunk"},
    }
    with model_directory(args.model) as found:
        dense = Engine("dense, resident", args, *found, **device)
        engines = [Engine(name, args, *found, **places[name]) for name in args.places]
    facts = machine_facts(dense.llm) | {"model": args.model}
    print(facts)
    generator = torch.Generator().manual_seed(0)
    for length in sorted(args.lengths, reverse=True):
        vocab_size = dense.llm.engine.model_config.vocab_size
        prompt = torch.randint(vocab_size, (length,), generator=generator).tolist()
        for case in args.cases:
            wanted = args.density or published_density(length)
            threshold = _at(wanted, policy.survey(case, engines[0], prompt))
            policy.choose(case, threshold)
            _time(dense, engines, prompt, case, threshold, args, facts)
    for engine in [dense, *engines]:
        engine.llm.close()


def _at(density: float, densities: list[float]) -> float:
    """Return the threshold of a density, between those of the survey in a straight line."""
    points = list(zip(densities, THRESHOLDS, strict=True))
    for (low, a), (high, b) in pairwise(points):
        if low <= density <= high:
            return a + (b - a) * (density - low) / max(high - low, 1e-9)
    return THRESHOLDS[0] if density < densities[0] else THRESHOLDS[-1]


def _time(
    dense: Engine,
    engines: list[Engine],
    prompt: list[int],
    case: str,
    threshold: float,
    args: argparse.Namespace,
    facts: dict[str, Any],
) -> None:
    """Time prefill on each engine, in turn."""
    samples: dict[str, list[float]] = {engine.name: [] for engine in [dense, *engines]}
    stats: dict[str, Any] = {}
    peaks: dict[str, list[int]] = {name: [] for name in samples}
    for turn in range(args.repeats + 1):  # the first turn warms up
        for engine in [dense, *engines]:
            engine.llm.reset_stats()
            ttft_ms = engine.generate(prompt).ttft_ms
            stats[engine.name] = engine.llm.stats()
            if turn:
                samples[engine.name].append(round(ttft_ms, 1))
                peaks[engine.name].append(stats[engine.name]["peak_device_bytes"])
    base = statistics.median(samples[dense.name])
    for name, values in samples.items():
        median = statistics.median(values)
        chosen = stats[name]["attention"]
        density = f", tile density {chosen['tile_density']:.3f}" if chosen else ""
        transfers = stats[name]["transfers"].get("prefill", {})
        waited = f", waited {transfers['wait_ms']:.0f} ms" if transfers else ""
        growth = (max(peaks[name]) - min(peaks[name])) / GIB
        print(
            f"prefill {len(prompt):7} {case:13} {name:16} {median:8.1f} ms ({min(values):.1f} to "
            f"{max(values):.1f}), {base / median:5.2f} times as fast{density}{waited}, KV "
            f"{stats[name]['kv_device_bytes'] / GIB:.2f} GiB, growth {growth:.3f} GiB",
            flush=True,
        )
    record = {"prefill": len(prompt), "case": case, "threshold": threshold, "ms": samples}
    write_record(args.json, facts | record | {"stats": stats})


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help="demo, llama-3.1-8b or a directory")
    add("--lengths", type=int, nargs="+", default=[131072])
    add("--cases", nargs="+", default=["group:8", "group:16", "row:16:guard", "row:32:guard"])
    places = ["resident", "layer-major", "chunk-major"]
    add("--places", nargs="+", default=places, choices=places, help="of the sparse KV cache")
    add("--density", type=float, help="tile density, instead of the published one")
    add("--repeats", type=int, default=3)
    add("--attention-backend", default="auto")
    add("--json", type=Path, help="file to append JSON lines to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
