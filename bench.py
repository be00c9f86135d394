"""Times nanovllm against transformers on the same model, in the same run.

    python bench.py                          # demo model on whatever device there is
    python bench.py --model llama-3.1-8b     # that shape with random weights, for a GPU

Each case is warmed up and repeated, the two engines in turn; medians are compared. Results go to
standard output as a table, and to `--json` as JSON lines with machine and versions.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.tools.demo_model import demo_model_path

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
ATTENTION_OF_TRANSFORMERS = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")


class Ours:
    """nanovllm under the clock."""

    name = "nanovllm"

    def __init__(self, directory: str, load_format: str, args: argparse.Namespace) -> None:
        self.llm = LLM(
            directory,
            load_format=load_format,
            dtype=args.dtype,
            device=args.device,
            max_model_len=args.prefill_tokens + 1024,
            max_num_seqs=max(args.batch, 8),
            enable_prefix_caching=False,
            attention_backend=args.attention_backend,
        )

    def prefill_ms(self, prompt: list[int]) -> float:
        """Return the time to the first token."""
        start = time.perf_counter()
        self._generate([prompt], 1)
        return (time.perf_counter() - start) * 1e3

    def decode_ms(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Return the time of one decode step of all prompts."""
        outputs = self._generate(prompts, num_tokens + 1)
        first = max(output.ttft_ms for output in outputs)
        last = max(output.ttft_ms + output.decode_ms for output in outputs)
        return (last - first) / num_tokens

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> list[Any]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return self.llm.generate(prompts, params, use_tqdm=False)


class Transformers:
    """transformers under the clock, with the attention that is fastest here."""

    name = "transformers"

    def __init__(self, model: Any, device: torch.device, prompt: list[int]) -> None:
        self.model = model
        self.device = device
        timings = {}
        for attention in ATTENTION_OF_TRANSFORMERS if device.type == "cuda" else ("sdpa",):
            try:
                model.set_attn_implementation(attention)
                timings[attention] = min(self.prefill_ms(prompt) for _ in range(4))
            except (ImportError, ValueError, RuntimeError) as error:
                print(f"transformers without {attention}: {str(error)[:100]}", file=sys.stderr)
        self.attention = min(timings, key=timings.__getitem__)
        model.set_attn_implementation(self.attention)

    @torch.inference_mode()
    def prefill_ms(self, prompt: list[int]) -> float:
        """Return the time of a forward pass with the logits of the last token."""
        ids = torch.tensor([prompt], device=self.device)
        start = time.perf_counter()
        self.model(ids, logits_to_keep=1, use_cache=True).logits.argmax().item()
        return (time.perf_counter() - start) * 1e3

    @torch.inference_mode()
    def decode_ms(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Return the time of one decode step of all prompts, which are of one length."""
        ids = torch.tensor(prompts, device=self.device)
        times = []
        for count in (1, num_tokens + 1):
            start = time.perf_counter()
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )[0, -1].item()
            times.append(time.perf_counter() - start)
        return (times[1] - times[0]) / num_tokens * 1e3


@contextmanager
def model_directory(model: str) -> Iterator[tuple[str, str]]:
    """Yield the directory of a model or a known shape, and how to load it."""
    if model != "llama-3.1-8b":
        yield str(demo_model_path() if model == "demo" else model), "auto"
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_8B))
        yield folder, "dummy"


def machine_facts(llm: LLM) -> dict[str, Any]:
    """Return what a figure needs to be repeated: time, command, machine and versions."""
    packages = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in ("triton", "flash-attn-4"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", *sys.argv]),
        "machine": f"{llm.engine.device.name}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "versions": packages,
        "attention": llm.engine.backend_name,
    }


def main() -> None:
    args = _parse_args()
    device = torch.device(args.device)
    with model_directory(args.model) as (directory, load_format):
        theirs_model = _load_transformers(directory, load_format, _torch_dtype(args), device)
        ours = Ours(directory, load_format, args)
    vocab_size = theirs_model.config.vocab_size
    generator = torch.Generator().manual_seed(0)

    def prompt(num_tokens: int) -> list[int]:
        ids: list[int] = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
        return ids

    long, short = prompt(args.prefill_tokens), prompt(args.decode_context)
    batch = [prompt(args.decode_context) for _ in range(args.batch)]
    theirs = Transformers(theirs_model, device, long)
    steps = args.decode_tokens
    cases: dict[str, dict[str, Callable[[], float]]] = {
        f"prefill {args.prefill_tokens}": {
            e.name: (lambda e=e: e.prefill_ms(long)) for e in (ours, theirs)
        },
        "decode step, 1 request": {
            e.name: (lambda e=e: e.decode_ms([short], steps)) for e in (ours, theirs)
        },
        f"decode step, {args.batch} requests": {
            e.name: (lambda e=e: e.decode_ms(batch, steps)) for e in (ours, theirs)
        },
    }
    facts = _facts(args, ours, theirs)
    medians: dict[str, dict[str, float]] = {}
    for case, engines in cases.items():
        medians[case], samples = _time(engines, args.repeats)
        write_record(
            args.json, facts | {"case": case, "unit": "ms", "samples": samples} | medians[case]
        )
    _print_table(args, medians, theirs_model, facts)


def _time(
    engines: dict[str, Callable[[], float]], repeats: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    samples: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(repeats + 1):  # the first turn warms up
        for name, run in engines.items():
            elapsed = run()
            if turn:
                samples[name].append(round(elapsed, 3))
    return {name: statistics.median(values) for name, values in samples.items()}, samples


def _print_table(
    args: argparse.Namespace,
    medians: dict[str, dict[str, float]],
    model: Any,
    facts: dict[str, Any],
) -> None:
    print(f"{facts['machine']}; {facts['versions']}; {facts['model']}, {facts['dtype']}")
    print(
        f"attention: nanovllm {facts['attention']}, transformers {facts['transformers_attention']}"
    )
    print(f"{'case':28}{'nanovllm ms':>13}{'transformers ms':>17}{'speed-up':>10}")
    for case, times in medians.items():
        ours, theirs = times["nanovllm"], times["transformers"]
        print(f"{case:28}{ours:13.2f}{theirs:17.2f}{theirs / ours:9.2f}x")
    single, many = (times["nanovllm"] for times in list(medians.values())[1:])
    print(f"tokens per second of {args.batch} requests / of 1: {args.batch * single / many:.2f}x")
    theirs_single = medians["decode step, 1 request"]["transformers"]
    print(
        f"tokens per second of {args.batch} requests / of transformers with 1: "
        f"{args.batch * theirs_single / many:.2f}x"
    )
    if args.bandwidth_gb_s:
        embedding = model.get_input_embeddings().weight
        tied = model.config.tie_word_embeddings
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        num_bytes -= 0 if tied else embedding.numel() * embedding.element_size()
        floor = num_bytes / args.bandwidth_gb_s / 1e6
        print(
            f"decode step / time to read {num_bytes / 1e9:.1f} GB of weights: {single / floor:.2f}"
        )


def _load_transformers(
    directory: str, load_format: str, dtype: torch.dtype, device: torch.device
) -> Any:
    if load_format == "auto":
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device)
        return model.eval()
    config = AutoConfig.from_pretrained(directory)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def _torch_dtype(args: argparse.Namespace) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, args.dtype)
    return dtype


def _facts(args: argparse.Namespace, ours: Ours, theirs: Transformers) -> dict[str, Any]:
    return machine_facts(ours.llm) | {
        "model": args.model,
        "dtype": args.dtype,
        "transformers_attention": theirs.attention,
        "decode_context": args.decode_context,
    }


def write_record(path: Path | None, record: dict[str, Any]) -> None:
    """Append a record to a file of JSON lines, if there is to be one."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _parse_args() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="demo, llama-3.1-8b or a directory")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--prefill-tokens", type=int, default=16384 if on_gpu else 4096)
    parser.add_argument("--decode-context", type=int, default=128)
    parser.add_argument("--decode-tokens", type=int, default=64 if on_gpu else 32)
    parser.add_argument("--batch", type=int, default=32 if on_gpu else 8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--bandwidth-gb-s", type=float, help="of the memory, for the floor of a step"
    )
    parser.add_argument("--json", type=Path, help="file to append JSON lines to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
