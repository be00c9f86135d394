"""How much of the true attention some sparse policies keep.

    python -m nanovllm.eval.recall --length 32768 --task vt \\
        --compare XATTN_BSA XATTN_BSA:estimator=group,threshold=0.9

Columns: density, tiles computed / causal tiles of whole prompts; kept, the mean share of a row's
attention mass that lies in the kept tiles; oracle, the most that as many key tiles could hold; the
mean of the 1% of rows that keep least; rows that keep less than 0.8; the relative RMS error of the
attention output. All but the density of query tiles drawn from the last three quarters of prompts.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from nanovllm.config import Config
from nanovllm.errors import BackendUnavailableError, CapacityError, ConfigError
from nanovllm.eval.recall.figures import RecallSummary
from nanovllm.eval.recall.probe import RecallProbe, draw_query_tiles
from nanovllm.eval.recall.report import as_json_lines, as_text
from nanovllm.eval.ruler import generate
from nanovllm.eval.ruler.policies import parse_policy
from nanovllm.kvcache.sparse.registry import create_policies
from nanovllm.kvcache.sparse.tile_policy import TilePolicy
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: run the prefills and print the tables."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        for name in ("tiles", "num_samples"):
            if (value := getattr(args, name)) < 1:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} {value}: not an integer >= 1")
        if args.json_output:
            args.json_output.parent.mkdir(parents=True, exist_ok=True)
        summaries = _run(args, _policies(args.model, args.compare))
        if args.json_output:
            lines = "".join(f"{line}\n" for line in as_json_lines(summaries))
            args.json_output.write_text(lines, encoding="utf-8")
    except (ConfigError, CapacityError, BackendUnavailableError, OSError) as error:
        parser.error(str(error))
    print(f"Prompts of {args.task}, {args.length} tokens: {args.num_samples}\n")
    print(as_text(summaries))


def _policies(model: str, texts: Sequence[str]) -> dict[str, TilePolicy]:
    """Return the policies that the texts mean, by label.

    Raises:
        ConfigError: a text means no policy that chooses tiles, or the same as another.
    """
    policies: dict[str, TilePolicy] = {}
    for text in texts:
        spec = parse_policy(text)
        policy, _ = create_policies(Config(model=model, **spec.options))
        if not isinstance(policy, TilePolicy):
            raise ConfigError(f"--compare {text}: {type(policy).__name__} chooses no tiles")
        if spec.label in policies:
            raise ConfigError(f"--compare: {spec.label} is there twice")
        policies[spec.label] = policy
    return policies


def _run(args: argparse.Namespace, policies: dict[str, TilePolicy]) -> dict[str, RecallSummary]:
    """Measure prompts of a task and return the figures of each policy."""
    probe = RecallProbe(policies, args.layers)
    options: dict[str, Any] = {
        "device": args.device,
        "enable_offload": args.enable_offload,
        "max_model_len": args.length,
        # A cache for one prompt leaves memory to the probe, and no prompt is to skip what another
        # computed.
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
    }
    random = Random(args.seed)
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(args.model, sparse_policy=probe, **options) as llm:
        _check_layers(args.layers or (), llm.engine.model_config.num_layers)
        for sample in generate(args.task, llm.tokenizer, args.length, args.num_samples, args.seed):
            probe.query_tiles = draw_query_tiles(len(sample.token_ids), args.tiles, random)
            (output,) = llm.generate([sample.token_ids], params, use_tqdm=False)
            if output.error:
                raise ConfigError(output.error)
        return {name: recall.summary() for name, recall in probe.recalls.items()}


def _check_layers(layers: Sequence[int], num_layers: int) -> None:
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise ConfigError(f"--layers {layer}: the model has layers 0 to {num_layers - 1}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m nanovllm.eval.recall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="demo", help="Hugging Face directory, or demo")
    add("--task", default="vt", help="one of RULER's tasks")
    add("--length", type=int, default=8192, help="tokens of the prompt and its answer")
    add("--num-samples", type=int, default=1, help="prompts")
    add("--tiles", type=int, default=16, help="query tiles of each prompt; all if they are fewer")
    add("--layers", type=int, nargs="+", help="layers to measure; without it, all")
    add("--seed", type=int, default=0, help="of the prompts and the query tiles")
    add("--compare", nargs="+", required=True, help="such as XATTN_BSA:threshold=0.9,stride=16")
    add("--json-output", type=Path, help="file to write, a line for each policy, layer and head")
    add("--enable-offload", action="store_true", help="keep the KV cache in host memory")
    add("--device", default="auto")
    return parser


if __name__ == "__main__":
    main()
