"""Shows which tiles of the attention mask XATTN_BSA keeps: runs one prefill and writes a PNG.

    python -m nanovllm.tools.show_selection                     # demo model, 8192 tokens
    python -m nanovllm.tools.show_selection --layers 3 19 --heads 1 --threshold 0.8
    python -m nanovllm.tools.show_selection --model DIR --prompt-file my.txt --input-len 32768

The prompt is a needle in a haystack unless a file is given. Prints the tile density of every layer.
Needs the extra `plots`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.errors import BackendUnavailableError, CapacityError, ConfigError
from nanovllm.eval.needle import NeedleTask, build_task
from nanovllm.kvcache.source import KVSource
from nanovllm.kvcache.sparse.policy import PolicyContext
from nanovllm.kvcache.sparse.registry import SparsePolicyType
from nanovllm.kvcache.sparse.xattn_bsa import XAttentionBSAPolicy
from nanovllm.llm import LLM
from nanovllm.ops.block_sparse import TILE, causal_tiles
from nanovllm.sampling_params import SamplingParams
from nanovllm.tools.card import require_matplotlib
from nanovllm.tools.selection_plot import MAX_COLUMNS, Selection, draw


class TileRecorder(XAttentionBSAPolicy):
    """Chooses as its base does, and keeps what it chose in some layers and heads, on the host."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tiles: dict[tuple[int, int], torch.Tensor] = {}
        """By layer and query head, bool `[num_tiles, num_tiles]`: query tiles by key tiles."""

    def watch(self, layers: Sequence[int], heads: Sequence[int], num_tokens: int) -> None:
        """Begin anew: keep the tiles of one prompt, in these layers and query heads."""
        num_tiles = -(-num_tokens // TILE)
        self.tiles = {
            panel: torch.zeros(num_tiles, num_tiles, dtype=torch.bool)
            for panel in product(layers, heads)
        }

    def select_tiles(self, source: KVSource, ctx: PolicyContext) -> torch.Tensor | None:
        """Choose the tiles, as the base class does. Waits for the device in watched layers."""
        tiles = super().select_tiles(source, ctx)
        q_len, history = len(ctx.query), ctx.num_history_tokens
        first = history // TILE
        for (layer, head), kept in self.tiles.items():
            if layer == ctx.layer_id:
                chosen = (
                    causal_tiles(q_len, history + q_len, history, 0, kept.device)
                    if tiles is None
                    else tiles[head].cpu()
                )
                kept[first : first + len(chosen), : chosen.shape[1]] = chosen
        return tiles


def record(
    llm: LLM,
    recorder: TileRecorder,
    token_ids: Sequence[int],
    layers: Sequence[int],
    heads: Sequence[int],
    label: str = "",
    needle: range | None = None,
) -> Selection:
    """Prefill a prompt and return the tiles that were kept.

    Args:
        llm: a model whose `sparse_policy` is `recorder`.
        recorder: its statistics are reset.
        token_ids: the prompt.
        layers: whose tiles to keep.
        heads: query heads whose tiles to keep.
        label: see `Selection`.
        needle: see `Selection`.

    Raises:
        ConfigError: the model has no such layer or head, or refuses the prompt.
    """
    model = llm.engine.model_config
    _check_ids("layers", layers, model.num_layers)
    _check_ids("heads", heads, model.num_q_heads)
    recorder.watch(layers, heads, len(token_ids))
    llm.reset_stats()
    params = SamplingParams(temperature=0, max_tokens=1)
    (output,) = llm.generate([list(token_ids)], params, use_tqdm=False)
    if output.error:
        raise ConfigError(output.error)
    densities = recorder.get_density_stats()["tile_density_by_head"]
    return Selection(label, len(token_ids), recorder.tiles, densities, needle)


def find_needle(tokenizer: Any, task: NeedleTask) -> range:
    """Return where in a task's tokens the needle stands."""
    # The last token may be another one before a space.
    needle = tokenizer.encode(task.needle, add_special_tokens=False)[:-1]
    size = len(needle)
    start = next(i for i in range(len(task.token_ids)) if task.token_ids[i : i + size] == needle)
    return range(start, start + size + 1)


def _check_ids(name: str, ids: Sequence[int], count: int) -> None:
    for i in ids:
        if not 0 <= i < count:
            raise ConfigError(f"--{name} {i}: the model has {name} 0 to {count - 1}")


def main(argv: list[str] | None = None) -> None:
    """Command line: run the prefill, print the densities, write the picture."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        require_matplotlib()
        if not args.output.parent.is_dir():
            raise ConfigError(f"--output: {args.output.parent} is not a directory")
        if len(args.layers) > MAX_COLUMNS:
            raise ConfigError(f"--layers: {len(args.layers)}, but {MAX_COLUMNS} fit a picture")
        selection = _run(args)
    except (ConfigError, CapacityError, BackendUnavailableError, OSError, UnicodeError) as error:
        parser.error(str(error))
    draw(selection, args.output)
    print(f"Picture:       {args.output}")


def _run(args: argparse.Namespace) -> Selection:
    """Print the densities and return what was kept."""
    # Made only to have the options checked: the engine cannot check those of an object.
    config = Config(
        model=args.model,
        sparse_policy=SparsePolicyType.XATTN_BSA,
        sparse_threshold=args.threshold,
        sparse_estimator=args.estimator,
        sparse_stride=args.stride,
        sparse_guard=args.guard,
        sparse_min_len=args.min_len,
    )
    text = args.prompt_file.read_text(encoding="utf-8") if args.prompt_file else None
    recorder = TileRecorder.from_config(config)
    with LLM(
        args.model,
        sparse_policy=recorder,
        max_model_len=args.input_len + 1,
        enable_offload=args.enable_offload,
        device=args.device,
        dtype=args.dtype,
    ) as llm:
        needle = None
        if text is not None:
            token_ids = llm.engine.encoder.encode(text)[: args.input_len]
        else:
            task = build_task(llm.tokenizer, args.input_len)
            token_ids, needle = task.token_ids, find_needle(llm.tokenizer, task)
        name = "demo model" if args.model == "demo" else Path(args.model).resolve().name[:28]
        label = f"{name}, {len(token_ids):,} tokens, threshold {recorder.threshold}"
        selection = record(llm, recorder, token_ids, args.layers, args.heads, label, needle)
        recorder.print_density_stats()
        return selection


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m nanovllm.tools.show_selection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="demo", help="Hugging Face directory, or demo")
    add("--input-len", type=int, default=8192, help="tokens of the prompt")
    add("--prompt-file", type=Path, help="text to run; its first --input-len tokens")
    add("--layers", type=int, nargs="+", default=[0, 7, 15, 29], help="columns of the picture")
    add("--heads", type=int, nargs="+", default=[0, 3, 8], help="query heads, its rows")
    add("--threshold", type=float, help="share of attention mass to keep")
    add("--estimator", default="row", help="row or group")
    add("--stride", type=int, help="of the estimate")
    add("--guard", type=float, help="keep tiles with more than this share of a row's mass")
    add("--min-len", type=int, default=0, help="tokens at positions before are dense")
    add("--output", type=Path, default=Path("selection.png"), help="where to write the picture")
    add("--enable-offload", action="store_true", help="keep the KV cache in host memory")
    add("--device", default="auto")
    add("--dtype", default="auto")
    return parser


if __name__ == "__main__":
    main()
