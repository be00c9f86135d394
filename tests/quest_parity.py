"""Transformers' forward pass with sparse decode: pages chosen in float64 by the definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel


class QuestReference:
    """A transformers model whose decode attends to chosen pages, and whose prefill is dense.

    Args:
        directory: the checkpoint.
        page_size: tokens of a page.
        num_pages: pages that each KV head attends to.
        num_recent: newest pages that are always among them, as the first page is.
        num_dense: pages of a context up to which it attends to all.
        estimator: by what pages are chosen, as `QuestPolicy` has it.
    """

    def __init__(
        self,
        directory: Path,
        page_size: int,
        num_pages: int,
        num_recent: int,
        num_dense: int = 0,
        estimator: str = "codes",
    ) -> None:
        self._score = {"codes": self._mass, "bounds": self._bound}[estimator]
        self.num_dropped = 0
        """Pages that decode left out."""
        self._sizes = page_size, num_pages, num_recent, num_dense
        name = f"pages_{id(self)}"
        AttentionInterface.register(name, self._attend)
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=name, local_files_only=True
        ).eval()

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Return the logits for each place of an answer, fp32 `[len(answer), vocab_size]`."""
        out = self._model(torch.tensor([list(prompt)]), use_cache=True)
        rows = [out.logits[0, -1]]
        for token in answer[:-1]:
            out = self._model(torch.tensor([[token]]), past_key_values=out.past_key_values)
            rows.append(out.logits[0, -1])
        return torch.stack(rows)

    def chosen(self, query: torch.Tensor, key: torch.Tensor) -> set[int]:
        """Return the pages of one KV head, for its queries `[group, dim]` and keys `[n, dim]`."""
        page_size, num_pages, num_recent, num_dense = self._sizes
        pages = key.split(page_size)
        if len(pages) <= num_dense:
            return set(range(len(pages)))
        # Of each page for each query, then the greatest share that a query gives it.
        # The newest page is chosen whatever its score.
        rows = [[float(self._score(q, page)) for page in pages[:-1]] for q in query]
        shares = torch.tensor(rows).log_softmax(-1).amax(0).tolist()
        forced = {0, *range(len(pages))[-num_recent:]}
        others = sorted(set(range(len(pages))) - forced, key=lambda i: (-shares[i], i))
        return forced | set(others[: max(0, num_pages - len(forced))])

    @staticmethod
    def _bound(q: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
        low, high = page.aminmax(dim=0)
        return torch.maximum(q * low, q * high).sum() * len(q) ** -0.5

    @staticmethod
    def _mass(q: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
        low, high = page.aminmax(dim=0)
        quarter = ((page - low) / (high - low) * 4).nan_to_num().floor().clamp(max=3)
        keys = low + (quarter + 0.5) / 4 * (high - low)
        return (keys @ q * len(q) ** -0.5).logsumexp(0)

    def _attend(self, module, query, key, value, attention_mask, scaling, **_):  # type: ignore[no-untyped-def]
        q, k, v = (x[0].double() for x in (query, key, value))
        group = len(q) // len(k)
        logits = q @ k.repeat_interleave(group, 0).mT * scaling
        q_len, k_len = logits.shape[1:]
        place = torch.arange(k_len)
        if q_len > 1:
            logits = logits.masked_fill(place > torch.arange(q_len)[:, None], float("-inf"))
        else:
            for head, keys in enumerate(k):
                mine = slice(head * group, (head + 1) * group)
                chosen = self.chosen(q[mine, 0], keys)
                page = place // self._sizes[0]
                kept = torch.tensor([int(i) in chosen for i in page])
                self.num_dropped += int(page[-1]) + 1 - len(chosen)
                logits[mine] = logits[mine].masked_fill(~kept, float("-inf"))
        out = logits.softmax(-1) @ v.repeat_interleave(group, 0)
        return out.transpose(0, 1)[None].to(query.dtype), None
