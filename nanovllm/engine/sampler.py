"""Chooses each request's next token from its logits."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from nanovllm.device import Device
from nanovllm.engine.sequence import Sequence

_TIE = 1e-6  # rounding of a distribution's sums: a share reached up to this is reached


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request's next token."""

    token_id: int | None
    """None if the logits are not finite."""
    logprobs: dict[int, float] | None
    """Raw log-probabilities of the best tokens and the chosen one, if asked for."""


class Sampler:
    """Samples a batch of requests, each as if it were alone.

    A draw inverts the cumulative distribution, in the vocabulary's order, at one number from the
    request's own generator. So a request's tokens depend on its seed and its logits, not on the
    requests beside it or on the device's random numbers.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def sample(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
        """Choose a token for each sequence and wait for the result.

        Args:
            logits: `[num_seqs, vocab_size]`, of any floating dtype.
            sequences: their sequences, in order. Each one that samples spends one draw.
        """
        penalised = self._penalise(logits, sequences)
        peaks, token_ids = penalised.max(-1)
        rows = [i for i, seq in enumerate(sequences) if seq.params.temperature > 0]
        if rows:
            index = self._device.upload(rows, torch.int64)
            drawn = self._draw(penalised[index], [sequences[i] for i in rows])
            token_ids.index_copy_(0, index, drawn)
        # A maximum passes NaN on; a logit of -inf only bars its token.
        finite = peaks.isfinite()
        chosen: list[int] = torch.where(finite, token_ids, -1).tolist()
        logprobs = self._logprobs(logits, chosen, sequences)
        return [
            Sampled(None if token_id < 0 else token_id, logprobs.get(i))
            for i, token_id in enumerate(chosen)
        ]

    def _penalise(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
        rows = [i for i, seq in enumerate(sequences) if seq.params.repetition_penalty != 1.0]
        if not rows:
            return logits
        logits = logits.float().clone()
        for i in rows:
            penalty = sequences[i].params.repetition_penalty
            lowered = torch.where(logits[i] > 0, logits[i] / penalty, logits[i] * penalty)
            logits[i] = torch.where(self._seen(sequences[i], logits.shape[1]), lowered, logits[i])
        return logits

    def _seen(self, seq: Sequence, vocab_size: int) -> torch.Tensor:
        """Return which tokens stand in the prompt or the answer, bool `[vocab_size]`.

        Kept on the device with the sequence, so that a token costs the same whatever the length.
        """
        if seq.seen is None:
            seq.seen = torch.zeros(vocab_size, dtype=torch.bool, device=self._device.torch_device)
            new = sorted(set(seq.token_ids))
        else:
            new = seq.token_ids[-1:]
        seq.seen[self._device.upload(new, torch.int64)] = True
        return seq.seen

    def _draw(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
        params = [seq.params for seq in sequences]
        temperature = self._column([p.temperature for p in params])
        logits = logits.double()
        peak = logits.max(-1, keepdim=True).values
        probs = ((logits - peak) / temperature).softmax(-1)
        if any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params):
            vocab_size = logits.shape[1]
            probs = _filter(
                probs,
                self._column(
                    [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
                ),
                self._column([p.top_p for p in params]),
                self._column([p.min_p for p in params]),
            )
        cumulative = probs.cumsum(-1)
        # At most 1 - 2**-53 of the total, so below it, rounded too.
        draws = self._column([seq.random.random() for seq in sequences]) * cumulative[:, -1:]
        # The first token whose cumulative probability exceeds the draw; it has some itself.
        return torch.searchsorted(cumulative, draws, right=True).squeeze(-1)

    def _column(self, values: list[float] | list[int]) -> torch.Tensor:
        return self._device.upload(values, torch.float64)[:, None]

    def _logprobs(
        self, logits: torch.Tensor, chosen: list[int], sequences: Seq[Sequence]
    ) -> dict[int, dict[int, float]]:
        wanted = {
            i: seq.params.logprobs
            for i, seq in enumerate(sequences)
            if seq.params.logprobs is not None and chosen[i] >= 0
        }
        if not wanted:
            return {}
        rows = self._device.upload(list(wanted), torch.int64)
        own_ids = self._device.upload([chosen[i] for i in wanted], torch.int64)[:, None]
        logprobs = logits[rows].float().log_softmax(-1)
        best, ids = logprobs.topk(min(max(wanted.values()), logits.shape[1]))
        # fp64 holds token ids exactly: one transfer brings all three.
        parts = (ids.double(), best.double(), logprobs.gather(1, own_ids).double())
        result = {}
        for (i, count), row in zip(wanted.items(), torch.cat(parts, dim=1).tolist(), strict=True):
            num_best = len(row) // 2
            best_ids = [int(token_id) for token_id in row[: min(count, num_best)]]
            result[i] = dict(zip(best_ids, row[num_best:], strict=False)) | {chosen[i]: row[-1]}
        return result


def _filter(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Set to 0 what `min_p`, then `top_k`, then `top_p` remove. `probs`: fp64 `[n, vocab_size]`."""
    descending, order = probs.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = (descending >= min_p * descending[:, :1]) & (rank < top_k)
    descending = torch.where(kept, descending, 0.0)
    # What lies before a token must fall short of the share for the token to be needed.
    before = descending.cumsum(-1) - descending
    needed = before < top_p * descending.sum(-1, keepdim=True) - _TIE
    # A row that asks for no filter must come out as if it were alone.
    needed |= top_p >= 1
    # The most likely token always stays, also under a share below the tie.
    descending = torch.where(needed | (rank == 0), descending, 0.0)
    return torch.zeros_like(probs).scatter_(1, order, descending)
