"""The engine: turns requests into sequences, steps them, and ends them."""

import gc
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.device import create_device
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.loading import load_runner
from nanovllm.engine.sampler import Sampled, Sampler
from nanovllm.engine.scheduler import Scheduler, Step
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.text import PromptEncoder, end_token_ids, load_tokenizer
from nanovllm.errors import CapacityError, ConfigError
from nanovllm.log import get_logger
from nanovllm.models.config import load_model_config
from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams

logger = get_logger(__name__)


class LLMEngine:
    """A loaded model and the requests that it serves. `LLM` is the interface to it.

    Raises:
        ConfigError, CapacityError, BackendUnavailableError: see `loading.load_runner`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        directory = _model_directory(config.model)
        self.model_config = load_model_config(directory)
        self.tokenizer = load_tokenizer(directory)
        self.encoder = PromptEncoder(self.tokenizer, self.model_config.vocab_size)
        self._end_ids = end_token_ids(directory, self.model_config.hf, self.tokenizer)
        self.device = create_device(config.device)
        self._sampler = Sampler(self.device)
        self._next_id = 0
        self._closed = False
        with self.device.active():
            loaded = load_runner(config, directory, self.model_config, self.device)
        self._runner = loaded.runner
        self.max_model_len, self._length_reason = loaded.max_model_len, loaded.length_reason
        self.dtype, self.backend_name = loaded.dtype, loaded.backend_name
        self._scheduler = Scheduler(
            BlockManager(
                loaded.num_blocks,
                config.block_size,
                config.enable_prefix_caching,
                loaded.caches_answers,
            ),
            min(config.max_num_seqs, loaded.max_num_seqs),
            config.max_num_batched_tokens,
            loaded.max_whole_prefill_tokens,
            loaded.chunk_multiple,
            takes_turns=config.prefill_order != "layer",
        )
        self._max_whole_prefill_tokens = loaded.max_whole_prefill_tokens

    def add_request(
        self, token_ids: list[int], params: SamplingParams, streaming: bool = False
    ) -> Sequence:
        """Queue a request and return its sequence, which `step` brings on.

        Raises:
            ConfigError: the prompt leaves no room for an answer.
            CapacityError: it is too long for the `prefill_order` asked for.
            RuntimeError: the engine is closed.
        """
        if self._closed:
            raise RuntimeError("this LLM is closed: make a new one")
        if len(token_ids) >= self.max_model_len:
            raise ConfigError(
                f"the prompt has {len(token_ids)} tokens, but prompt and answer together may have "
                f"{self.max_model_len}: {self._length_reason}"
            )
        longest = self._max_whole_prefill_tokens
        if self.config.prefill_order == "layer" and len(token_ids) > longest:
            raise CapacityError(
                f"prefill_order='layer': the prompt has {len(token_ids)} tokens, and the device "
                f"has room for the hidden states of {longest}. Use prefill_order='auto'"
            )
        seq_id, self._next_id = self._next_id, self._next_id + 1
        # As texts: integers of opposite sign would seed alike.
        seed = f"{self.config.seed}/{seq_id}" if params.seed is None else str(params.seed)
        detokenizer = (
            Detokenizer(self.tokenizer, params.stop, streaming) if self.tokenizer else None
        )
        if params.stop and detokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and the model directory has none")
        seq = Sequence(
            seq_id, list(token_ids), params, detokenizer, Random(seed), time.perf_counter()
        )
        self._scheduler.add(seq)
        return seq

    def step(self) -> Step:
        """Compute one step: bring chosen sequences on, and end those that are done.

        Waits for the device where tokens are sampled. If host memory cannot grow, the sequences of
        the step fail. If computing fails otherwise, they are aborted and the error is passed on.
        """
        step = self._scheduler.schedule()
        if not step.num_tokens:
            return step
        try:
            with self.device.active():
                self._compute(step)
        except CapacityError as error:
            for seq in step.sequences:
                self._fail(seq, str(error))
        except BaseException:
            # How far each sequence came is not known; those that wait or run beside can go on.
            for seq in step.sequences:
                self.abort(seq)
            raise
        return step

    def abort(self, seq: Sequence) -> None:
        """End a request that is not finished, and free its blocks."""
        if seq.status is not Status.FINISHED:
            self._finish(seq, "abort")
            if seq.detokenizer is not None:  # what it held back is part of the text
                seq.detokenizer.finish()

    def has_unfinished(self) -> bool:
        """Return whether some request waits or runs."""
        return bool(self._scheduler.sequences)

    def check_integrity(self) -> None:
        """Check the books of the KV blocks.

        Raises:
            RuntimeError: a block is lost, counted wrongly or cached under a wrong hash.
        """
        self._scheduler.check_integrity()

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its blocks back and compute its tokens again."""
        return self._scheduler.num_preemptions

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no sequence uses."""
        return self._scheduler.block_manager.num_free_blocks

    def stats(self) -> dict[str, Any]:
        """Return what `LLM.stats` documents. Waits for the device."""
        self.device.synchronize()
        return self._runner.stats() | {
            "peak_device_bytes": self.device.max_memory_bytes(),
            "num_preemptions": self.num_preemptions,
        }

    def reset_stats(self) -> None:
        """Let copies, waits, choices of the policy and peak memory be counted anew."""
        self._runner.reset_stats()
        self.device.reset_max_memory()

    def close(self) -> None:
        """Give back the model and its cache. Once closed, closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        for seq in self._scheduler.sequences:
            self.abort(seq)
        self._runner.close()
        del self._runner
        gc.collect()
        with self.device.active():
            self.device.release_cached_memory()

    def _compute(self, step: Step) -> None:
        logits = self._runner.run(step)
        sequences = step.sampled
        sampled = self._sampler.sample(logits, sequences) if sequences else []
        self._scheduler.commit(step)
        now = time.perf_counter()
        for seq, result in zip(sequences, sampled, strict=True):
            self._advance(seq, result, now)

    def _advance(self, seq: Sequence, sampled: Sampled, now: float) -> None:
        if sampled.token_id is None:
            self._fail(seq, _not_finite(self.dtype))
            return
        seq.token_ids.append(sampled.token_id)
        if sampled.logprobs is not None:
            seq.logprobs.append(sampled.logprobs)
        if len(seq.token_ids) == seq.num_prompt_tokens + 1:
            seq.first_token_s = now
        seq.last_token_s = now
        try:
            reason = self._finish_reason(seq, sampled.token_id)
        except Exception as error:
            logger.exception("request %d failed", seq.seq_id)
            self._fail(seq, f"{type(error).__name__}: {error}")
            return
        if reason is not None:
            self._finish(seq, reason)

    def _finish_reason(self, seq: Sequence, token_id: int) -> FinishReason | None:
        """Return why the sequence ends with its newest token, if it does, and complete its text."""
        params = seq.params
        ends = token_id in params.stop_token_ids or (
            token_id in self._end_ids and not params.ignore_eos
        )
        full = (
            seq.num_tokens - seq.num_prompt_tokens >= params.max_tokens
            or seq.num_tokens >= self.max_model_len
        )
        found = None
        if seq.detokenizer is not None:
            if not ends:  # the text of an end token is not part of the answer
                found = seq.detokenizer.append(token_id)
            if (ends or full) and found is None:
                found = seq.detokenizer.finish()
        if found is not None:
            seq.stop_reason = found
        elif token_id in params.stop_token_ids:
            seq.stop_reason = token_id
        if ends or found is not None:
            return "stop"
        return "length" if full else None

    def _fail(self, seq: Sequence, message: str) -> None:
        seq.error = message
        self._finish(seq, "error")

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(seq, reason)
        seq.seen = None


def _not_finite(dtype: torch.dtype) -> str:
    remedy = '. Use dtype="bfloat16" or dtype="float32"' if dtype == torch.float16 else ""
    return f"the logits are not finite: activations overflowed {dtype}{remedy}"


def _model_directory(model: str) -> Path:
    if model != "demo":
        return Path(model).expanduser()
    from nanovllm.tools.demo_model import demo_model_path

    return demo_model_path()
