"""Times a KV cache in host memory against one on the GPU, on the same prompts in the same run.

    python bench_offload.py                                # Llama-3.1-8B shape, 32K to 128K
    python bench_offload.py --model demo --lengths 16384   # any model that bench.py takes

For each length: prefill with the cache on the device, layer-major and chunk-major over host memory,
in turn; then decode over host memory. Copies are compared with the rate that copies of their size
reach alone. `--profile` adds a table of what the copy engines did beside the kernels.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench import machine_facts, model_directory, write_record
from nanovllm import LLM, SamplingParams

GIB = 1 << 30


class Engine:
    """An LLM under the clock."""

    def __init__(
        self, name: str, args: argparse.Namespace, directory: str, load_format: str, **options: Any
    ) -> None:
        self.name = name
        self.llm = LLM(
            directory,
            load_format=load_format,
            dtype="bfloat16",
            max_model_len=max(args.lengths) + 1024,
            enable_prefix_caching=False,
            attention_backend=args.attention_backend,
            **options,
        )

    def generate(self, prompt: list[int], num_tokens: int = 1) -> Any:
        """Return the output of one greedy request."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return self.llm.generate([prompt], params, use_tqdm=False)[0]


def main() -> None:
    args = _parse_args()
    # No more blocks than the longest prompt needs: the warm-up turn makes all of them.
    longest = max(args.lengths) + 1024
    host = {"enable_offload": True, "num_kvcache_blocks": -(-longest // 1024)}
    chunked = {"prefill_order": "chunk", "max_num_batched_tokens": args.chunk_tokens}
    with model_directory(args.model) as found:
        offloaded = [Engine("layer-major", args, *found, prefill_order="layer", **host)]
        resident = []
        if args.cases != "decode":
            num_blocks = -(-longest // 256)
            resident = [
                Engine("resident", args, *found, num_kvcache_blocks=num_blocks, max_num_seqs=8)
            ]
            offloaded.append(Engine("chunk-major", args, *found, **chunked, **host))
    llm = offloaded[0].llm
    facts = machine_facts(llm) | {"model": args.model}
    print(facts)
    generator = torch.Generator().manual_seed(0)
    for length in sorted(args.lengths, reverse=True):
        vocab_size = llm.engine.model_config.vocab_size
        prompt = torch.randint(vocab_size, (length,), generator=generator).tolist()
        if resident:
            _time_prefill([*resident, *offloaded], prompt, args, facts)
        if args.cases != "prefill":
            _time_decode(llm, prompt, args, facts)
        if args.profile:
            for engine in offloaded:
                _profile(f"prefill {length} {engine.name}", partial(engine.generate, prompt))
    for engine in [*resident, *offloaded]:
        engine.llm.close()


def _time_prefill(
    engines: list[Engine], prompt: list[int], args: argparse.Namespace, facts: dict[str, Any]
) -> None:
    """Time prefill on each engine, in turn."""
    samples: dict[str, list[float]] = {engine.name: [] for engine in engines}
    stats = {}
    for turn in range(args.repeats + 1):  # the first turn warms up
        for engine in engines:
            engine.llm.reset_stats()
            ttft_ms = engine.generate(prompt).ttft_ms
            stats[engine.name] = engine.llm.stats()
            if turn:
                samples[engine.name].append(round(ttft_ms, 2))
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name, median in medians.items():
        print(
            f"prefill {len(prompt):7} {name:12} {median:9.1f} ms "
            f"({min(samples[name]):.1f} to {max(samples[name]):.1f}) "
            f"{median / medians['resident']:6.3f} of resident; {_describe(stats[name])}"
        )
    write_record(args.json, facts | {"prefill": len(prompt), "ms": samples, "stats": stats})


def _time_decode(
    llm: LLM, prompt: list[int], args: argparse.Namespace, facts: dict[str, Any]
) -> None:
    """Time decode over host memory against reading the cache at the measured rate."""
    params = SamplingParams(temperature=0, max_tokens=args.decode_tokens + 2, ignore_eos=True)
    times = []
    for _ in llm.stream([prompt], params):
        times.append(time.perf_counter())
        if len(times) == 2:  # the first decode step warms up
            llm.reset_stats()
    samples = [round((b - a) * 1e3, 2) for a, b in pairwise(times[1:])]
    stats = llm.stats()
    traffic = stats["transfers"]["decode"]["h2d"]
    num_bytes = (traffic["key_bytes"] + traffic["value_bytes"]) / args.decode_tokens
    copy_bytes = num_bytes * args.decode_tokens / max(1, traffic["num_copies"])
    rate = copy_rate(llm, int(copy_bytes), to_device=True)
    best = copy_rate(llm, GIB, to_device=True)
    floor = num_bytes / best / 1e6
    median = statistics.median(samples)
    print(
        f"decode  {len(prompt):7} {median:9.2f} ms a token ({min(samples):.2f} to "
        f"{max(samples):.2f}, n = {len(samples)}); {num_bytes / 1e9:.2f} GB in copies of "
        f"{copy_bytes / 2**20:.1f} MiB, {num_bytes / median / 1e6:.1f} GB/s; such copies alone "
        f"{rate:.1f}, of 1 GiB {best:.1f} GB/s; {median / floor:.3f} of the floor; waited "
        f"{stats['transfers']['decode']['wait_ms'] / args.decode_tokens:.1f} ms a token"
    )
    rates = {"copy_gb_s": rate, "best_copy_gb_s": best}
    write_record(args.json, facts | rates | {"decode": len(prompt), "ms": samples, "stats": stats})


def copy_rate(llm: LLM, num_bytes: int, to_device: bool) -> float:
    """Return the GB/s of pinned copies of a size, one behind the other on one stream."""
    device = llm.engine.device
    num_bytes = max(4096, num_bytes)
    host = device.allocate_host((num_bytes,), torch.uint8)
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    stream = device.new_stream("rate")
    target, source = (on_device, host.tensor) if to_device else (host.tensor, on_device)
    count = max(3, min(100, GIB // num_bytes))
    for _ in range(3):
        stream.copy(target, source)
    before = stream.record(timed=True)
    for _ in range(count):
        stream.copy(target, source)
    after = stream.record(timed=True)
    after.synchronize()
    host.release()
    return count * num_bytes / after.ms_since(before) / 1e6


def _profile(name: str, run: Callable[[], Any]) -> None:
    """Print what the copy engines and the kernels did in a run."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    busy: dict[str, list[tuple[int, int]]] = {"kernels": [], "h2d": [], "d2h": []}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        kind = {"Memcpy HtoD": "h2d", "Memcpy DtoH": "d2h"}.get(event.name()[:11], "kernels")
        if event.duration_ns() > 0 and not event.name().startswith("Memset"):
            busy[kind].append((event.start_ns(), event.start_ns() + event.duration_ns()))
    kernels = _union(busy["kernels"])
    begin, end = kernels[0][0], kernels[-1][1]
    print(f"profile of {name}: {(end - begin) / 1e6:.1f} ms, kernels {_length(kernels):.1f} ms")
    for kind in ("h2d", "d2h"):
        copies = _union(busy[kind])
        hidden = _length(copies) + _length(kernels) - _length(_union(copies + kernels))
        print(
            f"  {kind}: {len(busy[kind])} copies, {_length(copies):.1f} ms busy, of which "
            f"{hidden:.1f} ms beside kernels"
        )


def _union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _length(spans: list[tuple[int, int]]) -> float:
    """Return the length of disjoint spans in milliseconds."""
    return sum(stop - start for start, stop in spans) / 1e6


def _describe(stats: dict[str, Any]) -> str:
    text = f"KV on the device {stats['kv_device_bytes'] / GIB:.2f} GiB"
    text += f", peak {stats['peak_device_bytes'] / GIB:.1f} GiB"
    for direction, traffic in stats["transfers"].get("prefill", {}).items():
        if direction == "wait_ms":
            text += f", waited {traffic:.1f} ms"
        elif traffic["num_copies"]:
            num_bytes = traffic["key_bytes"] + traffic["value_bytes"]
            text += f", {direction} {num_bytes / 1e9:.1f} GB in {traffic['num_copies']} copies"
    return text


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="llama-3.1-8b", help="demo, llama-3.1-8b or a directory")
    add("--lengths", type=int, nargs="+", default=[32768, 65536, 131072])
    add("--chunk-tokens", type=int, default=8192, help="chunk of the chunk-major prefill")
    add("--decode-tokens", type=int, default=24)
    add("--cases", default="all", choices=["all", "prefill", "decode"])
    add("--repeats", type=int, default=3)
    add("--attention-backend", default="auto")
    add("--profile", action="store_true", help="profile one prefill of each order")
    add("--json", type=Path, help="file to append JSON lines to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
