"""Transformers' forward pass with sparse prefill: tiles chosen in float64 by the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from nanovllm.ops import xattn_reference as reference

TILE = reference.TILE
# From queries and keys, fp64 `[heads, n, dim]`, to bool `[num_q_heads, num_tiles, num_tiles]`.
Chooser = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def chosen_by_mass(
    threshold: float, stride: int, estimator: str = "group", gamma: float | None = None
) -> Chooser:
    """Return how XAttention chooses tiles, by its definition."""
    masses_of = {"group": reference.tile_masses_group, "row": reference.tile_masses_row}[estimator]

    def choose(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        masses, peaks = masses_of(query, key, 0, stride)
        return reference.select_tiles(masses, threshold, 0, peaks, gamma)

    return choose


class SparseReference:
    """A transformers model whose prefill attends inside chosen tiles, and whose decode is dense.

    Args:
        directory: the checkpoint.
        choose: chooses a layer's tiles.
    """

    def __init__(self, directory: Path, choose: Chooser) -> None:
        self.tiles: list[torch.Tensor] = []
        """Of each layer, in the last prefill."""
        name = f"tiles_{id(self)}"
        AttentionInterface.register(name, self._attend)
        self._choose = choose
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=name, local_files_only=True
        ).eval()

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return the logits for each place of an answer, fp32 `[len(answer), vocab_size]`."""
        self.tiles.clear()
        out = self._model(torch.tensor([list(prompt)]), use_cache=True)
        rows = [out.logits[0, -1]]
        for token in answer[:-1]:
            out = self._model(torch.tensor([[token]]), past_key_values=out.past_key_values)
            rows.append(out.logits[0, -1])
        return torch.stack(rows)

    def _attend(self, module, query, key, value, attention_mask, scaling, **_):  # type: ignore[no-untyped-def]
        q, k, v = (x[0].double() for x in (query, key, value))
        group = len(q) // len(k)
        logits = q @ k.repeat_interleave(group, 0).mT * scaling
        q_len, k_len = logits.shape[1:]
        if q_len > 1:
            tiles = self._choose(q, k)
            self.tiles.append(tiles)
            place = torch.arange(k_len)
            visible = tiles[:, place[:, None] // TILE, place // TILE] & (place <= place[:, None])
            logits = logits.masked_fill(~visible, float("-inf"))
        out = logits.softmax(-1) @ v.repeat_interleave(group, 0)
        return out.transpose(0, 1)[None].to(query.dtype), None
