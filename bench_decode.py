"""Times sparse decode over a KV cache in host memory against dense decode, in the same run.

    python bench_decode.py                                 # Llama-3.1-8B shape, 64K and 128K
    python bench_decode.py --model demo --lengths 32768    # any model that bench.py takes

For each length: dense decode with the cache on the device and in host memory, then QUEST for each
budget, with nothing kept from step to step, and with a hot cache. A random model's queries do not
repeat as real ones do, nor does its residual stream foretell the next layer's. So pages are chosen
by a plan: of each step's pages a share of `--reuse` was in the step before (with nothing kept:
none) and the others were in none for long, and of those fetched ahead a share of `--foresight` is
wanted. Pages are scored all the same. The prompt is computed with a window, since decode is what is
timed.
"""

import argparse
import math
import re
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench import machine_facts, model_directory, write_record
from nanovllm import LLM, STREAMING, SamplingParams
from nanovllm.kvcache.paged_layer import PagedLayer
from nanovllm.kvcache.sparse.quest import QuestPolicy
from nanovllm.ops.page_index import PageIndex

GIB = 1 << 30
_PLANNED_STEPS = 64


class PlannedPages(QuestPolicy):
    """Chooses pages along a random order, some further in each step, after scoring them.

    Args:
        token_budget, estimator, prefetch: as for `QuestPolicy`.
        reuse: share of a step's pages that the step before used too.
        foresight: share of the pages fetched ahead that are wanted then.
    """

    def __init__(
        self, token_budget: int, estimator: str, prefetch: float, reuse: float, foresight: float
    ) -> None:
        super().__init__(token_budget, estimator=estimator, prefetch=prefetch)
        self._advance = round(self.pages.num_pages * (1 - reuse))
        self._foresight = foresight
        self._plans: tuple[torch.Tensor, torch.Tensor] | None = None
        self._is_guess = False
        self._first_layer: PageIndex | None = None
        self._planned: list[torch.Tensor] = []

    def fetch_ahead(self, query: torch.Tensor, layer: PagedLayer, softmax_scale: float) -> None:
        self._is_guess = True
        super().fetch_ahead(query, layer, softmax_scale)
        self._is_guess = False

    def _score(self, query: torch.Tensor, layer: PagedLayer, softmax_scale: float) -> torch.Tensor:
        scores = super()._score(query, layer, softmax_scale)
        if self._plans is None or self._plans[0].shape[3] != scores.shape[3]:
            self._plans = self._make_plans(scores)
        self._first_layer = self._first_layer or layer.index
        if layer.index is self._first_layer:
            step = layer.context_lens % _PLANNED_STEPS
            self._planned = [plan.index_select(0, step) for plan in self._plans]
        # For all layers, and for all queries of a KV head, the same.
        return self._planned[self._is_guess].expand_as(scores)

    def _make_plans(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores to choose and to guess by, for lengths of the context in turn."""
        num_pages = scores.shape[3]
        true, other = torch.rand(2, *scores[:1, :, :1].shape, device=scores.device)
        order, other = true.argsort(-1).float(), other.argsort(-1).float()
        step = torch.arange(_PLANNED_STEPS, device=scores.device)[:, None, None, None]
        ahead = torch.remainder(order - step * self._advance, num_pages)
        # Pages that are not foreseen count for what they are not, others each step.
        hidden = torch.remainder(other - step * 997, num_pages)
        unforeseen = torch.remainder(order + step * 61, num_pages) >= self._foresight * num_pages
        return -ahead, -torch.where(unforeseen, hidden, ahead)


def main() -> None:
    args = _parse_args()
    host = {
        "enable_offload": True,
        "num_kvcache_blocks": args.num_seqs * (-(-max(args.lengths) // 1024) + 1),
    }
    cases: dict[str, dict[str, Any]] = {
        "dense, on the device": {"num_kvcache_blocks": -(-max(args.lengths) // 256) + 4},
        "dense, in host memory": host,
    }
    for budget in args.budgets:
        for estimator, prefetch in product(args.estimators, args.prefetch):
            name = f"QUEST {budget} {estimator}, ahead {prefetch}"
            planned = partial(PlannedPages, budget, estimator, prefetch, foresight=args.foresight)
            cases[f"{name}, nothing kept"] = host | {
                "decode_policy": planned(reuse=0),
                "decode_hot_cache_gb": 0,
            }
            if args.reuse is not None:
                cases[f"{name}, reuse {args.reuse}"] = host | {
                    "decode_policy": planned(reuse=args.reuse)
                }
    if args.cases is not None:
        cases = {name: case for name, case in cases.items() if re.search(args.cases, name)}
    with model_directory(args.model) as found:
        medians: dict[int, dict[str, float]] = {length: {} for length in args.lengths}
        for name, options in cases.items():
            _time_case(name, options, args, found, medians)
    for length, by_case in medians.items():
        dense = by_case.get("dense, in host memory", math.nan)
        for name, median in by_case.items():
            print(f"{length:7} {name:44} {median:9.2f} ms a token, {dense / median:6.1f} times")


def _time_case(
    name: str,
    options: dict[str, Any],
    args: argparse.Namespace,
    found: tuple[str, str],
    medians: dict[int, dict[str, float]],
) -> None:
    """Time one kind of decode at every length."""
    directory, load_format = found
    with LLM(
        directory,
        load_format=load_format,
        dtype="bfloat16",
        max_model_len=max(args.lengths) + 1024,
        max_num_seqs=args.num_seqs,
        enable_prefix_caching=False,
        sparse_policy=STREAMING,
        **options,
    ) as llm:
        generator = torch.Generator().manual_seed(0)
        for length in sorted(args.lengths, reverse=True):
            vocab_size = llm.engine.model_config.vocab_size
            # Room for the tokens that are generated, inside the last block.
            size = length - args.decode_tokens - 8
            shape = args.num_seqs, size
            prompts = torch.randint(vocab_size, shape, generator=generator).tolist()
            samples, stats = _decode_ms(llm, prompts, args.decode_tokens)
            medians[length][name] = statistics.median(samples)
            pages = stats.get("pages", {})
            print(
                f"{length:7} {name:44} {medians[length][name]:9.2f} ms a step ({min(samples):.2f} "
                f"to {max(samples):.2f}, n = {len(samples)}); KV on the device "
                f"{stats['kv_device_bytes'] / GIB:.2f} GiB, peak "
                f"{stats['peak_device_bytes'] / GIB:.1f} GiB; "
                + ", ".join(f"{key} {value:.4g}" for key, value in pages.items())
            )
            record = {"decode": length, "case": name, "ms": samples, "stats": stats}
            write_record(args.json, machine_facts(llm) | {"model": args.model} | record)


def _decode_ms(
    llm: LLM, prompts: list[list[int]], num_tokens: int
) -> tuple[list[float], dict[str, Any]]:
    """Return the time of each step that decodes all but the first few, and what they counted."""
    # The first to be ready go on while the others' prompts are computed.
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    requests = [llm.engine.add_request(prompt, params) for prompt in prompts]
    times: list[float] = []
    while llm.engine.has_unfinished() and len(times) < num_tokens + 3:
        start = time.perf_counter()
        step = llm.engine.step()
        if len(step.decodes) == len(prompts):
            times.append(time.perf_counter() - start)
            if len(times) == 3:
                llm.reset_stats()
    stats = llm.stats()
    for request in requests:
        llm.engine.abort(request)
    return [round(seconds * 1e3, 3) for seconds in times[3:]], stats


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help="demo, llama-3.1-8b or a directory")
    add("--lengths", type=int, nargs="+", default=[131072, 65536])
    add("--budgets", type=int, nargs="+", default=[4096, 2048])
    add("--estimators", nargs="+", default=["codes"], help="codes, bounds")
    add("--prefetch", type=float, nargs="+", default=[0.0], help="see decode_prefetch")
    add("--foresight", type=float, default=0.78, help="share of guessed pages that are wanted")
    add("--num-seqs", type=int, default=1, help="requests that decode together, with QUEST only")
    add("--reuse", type=float, help="share of a step's pages that the step before used too")
    add("--cases", help="run those whose name this regular expression finds")
    add("--decode-tokens", type=int, default=32)
    add("--json", type=Path, help="file to append JSON lines to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
