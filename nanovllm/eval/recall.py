"""Recall: how much of the true attention mass lies in the tiles that a policy keeps.

    python -m nanovllm.eval.recall --length 32768 --task vt \\
        --compare XATTN_BSA:threshold=0.9 XATTN_BSA:estimator=row,stride=16,threshold=0.8

A prefill attends densely while each policy chooses tiles of the same queries and keys; the true
softmax of some rows, drawn at random, tells what the policy would have kept of them.
"""

import argparse
from dataclasses import dataclass, field
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.eval.ruler import generate
from nanovllm.eval.ruler.policies import parse_policy
from nanovllm.kvcache.source import KVSource
from nanovllm.kvcache.sparse.policy import PolicyContext
from nanovllm.kvcache.sparse.registry import create_policies
from nanovllm.kvcache.sparse.tile_policy import TilePolicy
from nanovllm.llm import LLM
from nanovllm.metrics.density import DensityStats
from nanovllm.ops.block_sparse import TILE, num_causal_tiles
from nanovllm.sampling_params import SamplingParams

_LOW = 0.8


@dataclass(slots=True)
class Recall:
    """What one policy kept, by layer."""

    kept: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Of each chunk, `[num_q_heads, num_rows]`: the share of each row's mass."""
    density: DensityStats = field(default_factory=DensityStats)

    def rows(self, layer_id: int | None = None) -> torch.Tensor:
        """Return the shares of all rows of all heads, of one layer or of all."""
        layers = self.kept if layer_id is None else [layer_id]
        return torch.cat([part.flatten() for layer in layers for part in self.kept[layer]])


class RecallProbe(TilePolicy):
    """Attends densely and notes what other policies would keep.

    Args:
        policies: by name; each works on tiles.
        num_rows: query rows of a chunk that are looked at.
        first_row: rows before this position are left out: they see little that can be skipped.
    """

    log_name = "recall"

    def __init__(
        self, policies: dict[str, TilePolicy], num_rows: int = 64, first_row: int = 0
    ) -> None:
        super().__init__()
        self.recalls = {name: Recall() for name in policies}
        self._policies = policies
        self._num_rows, self._first_row = num_rows, first_row
        self._generator = torch.Generator().manual_seed(0)

    def select_tiles(self, source: KVSource, ctx: PolicyContext) -> None:
        first = max(0, self._first_row - ctx.num_history_tokens)
        candidates = torch.randperm(max(0, len(ctx.query) - first), generator=self._generator)
        rows = (first + candidates[: self._num_rows]).sort().values.to(ctx.query.device)
        num_causal = num_causal_tiles(len(ctx.query), ctx.num_history_tokens)
        masses = _true_masses(ctx, source.keys(), rows) if len(rows) else None
        for name, policy in self._policies.items():
            tiles = policy.select_tiles(source, ctx)
            recall, layer = self.recalls[name], ctx.layer_id
            if tiles is None:
                recall.density.add_dense(layer, ctx.query.shape[1], num_causal)
            else:
                recall.density.add(layer, tiles, num_causal)
            if masses is not None:
                kept = masses if tiles is None else masses * tiles[:, rows // TILE]
                recall.kept.setdefault(layer, []).append(kept.sum(-1))


def _true_masses(ctx: PolicyContext, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return each tile's share in some rows' softmax, fp32 `[num_q_heads, num_rows, tiles]`."""
    num_q_heads, num_kv_heads = ctx.query.shape[1], keys.shape[1]
    query = ctx.query[rows].float().transpose(0, 1).unflatten(0, (num_kv_heads, -1))
    # [num_kv_heads, heads of each, num_rows, k_len]
    logits = query @ keys.float().permute(1, 2, 0)[:, None] * ctx.softmax_scale
    position = ctx.num_history_tokens + rows
    hidden = torch.arange(len(keys), device=rows.device) > position[:, None]
    shares = logits.masked_fill_(hidden, float("-inf")).softmax(-1)
    shares = torch.nn.functional.pad(shares, (0, -len(keys) % TILE))
    masses: torch.Tensor = shares.unflatten(-1, (-1, TILE)).sum(-1)
    return masses.view(num_q_heads, len(rows), -1)


def describe(recalls: dict[str, Recall]) -> str:
    """Return a table of all policies, and one by layer."""
    width = max(map(len, recalls))
    lines = [f"{'policy':{width}}  density  mean   worst 0.1%  rows below {_LOW:.0%}"]
    for name, recall in recalls.items():
        rows = recall.rows()
        worst = float(rows.sort().values[: max(1, len(rows) // 1000)].mean())
        low = float((rows < _LOW).float().mean())
        lines.append(
            f"{name:{width}}  {recall.density.summary()['tile_density']:7.3f}  "
            f"{float(rows.mean()):.3f}  "
            f"{worst:10.2f}  {low:14.1%}"
        )
    lines += ["", f"mean by layer{' ' * max(0, width - 12)}"]
    for name, recall in recalls.items():
        means = (f"{float(recall.rows(layer).mean()):.2f}" for layer in sorted(recall.kept))
        lines.append(f"{name:{width}}  {' '.join(means)}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    policies: dict[str, TilePolicy] = {}
    for text in args.compare:
        spec = parse_policy(text)
        policy, _ = create_policies(Config(model=args.model, **spec.options))
        if not isinstance(policy, TilePolicy):
            raise ConfigError(f"--compare {text}: {type(policy).__name__} chooses no tiles")
        policies[spec.label] = policy
    probe = RecallProbe(policies, args.rows, args.length // 4)
    options: dict[str, Any] = {"max_model_len": args.length, "device": args.device}
    with LLM(args.model, sparse_policy=probe, **options) as llm:
        probe.recalls = {name: Recall() for name in policies}  # without what loading ran
        for sample in generate(args.task, llm.tokenizer, args.length, args.num_samples, args.seed):
            params = SamplingParams(temperature=0, max_tokens=1)
            llm.generate([sample.token_ids], params, use_tqdm=False)
    print(f"{args.num_samples} prompts of {args.task}, {args.length} tokens, last three quarters")
    print(describe(probe.recalls))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo", help="Hugging Face directory, or demo")
    add("--task", default="vt", help="one of RULER's tasks")
    add("--length", type=int, default=8192, help="tokens of the prompt and its answer")
    add("--num-samples", type=int, default=1)
    add("--rows", type=int, default=64, help="query rows of each chunk and layer")
    add("--seed", type=int, default=0)
    add("--device", default="auto")
    add("--compare", nargs="+", required=True, help="such as XATTN_BSA:threshold=0.9,stride=16")
    return parser


if __name__ == "__main__":
    main()
