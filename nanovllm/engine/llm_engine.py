"""The engine: turns requests into sequences, steps them, and ends them."""

import gc
import time
from pathlib import Path
from random import Random

import torch

from nanovllm.config import Config
from nanovllm.device import Device, create_device
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.engine.memory_plan import plan_kv_cache
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sampler import Sampled, Sampler
from nanovllm.engine.scheduler import Scheduler, Step
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.text import PromptEncoder, end_token_ids, load_tokenizer
from nanovllm.errors import ConfigError
from nanovllm.kvcache.resident import ResidentKVCache
from nanovllm.kvcache.sparse.registry import create_policy
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.log import get_logger
from nanovllm.models.config import ModelConfig, load_model_config
from nanovllm.models.loader import load_model
from nanovllm.ops.backends import resolve_backend
from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams

logger = get_logger(__name__)


class LLMEngine:
    """A loaded model and the requests that it serves. `LLM` is the interface to it."""

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
        self._make_runner(directory)

    def add_request(
        self, token_ids: list[int], params: SamplingParams, streaming: bool = False
    ) -> Sequence:
        """Queue a request and return its sequence, which `step` brings on.

        Raises:
            ConfigError: the prompt leaves no room for an answer.
            RuntimeError: the engine is closed.
        """
        if self._closed:
            raise RuntimeError("this LLM is closed: make a new one")
        if len(token_ids) >= self.max_model_len:
            raise ConfigError(
                f"the prompt has {len(token_ids)} tokens, but prompt and answer together may have "
                f"{self.max_model_len}: {self._length_reason}"
            )
        seq_id, self._next_id = self._next_id, self._next_id + 1
        seed = params.seed if params.seed is not None else f"{self.config.seed}/{seq_id}"
        detokenizer = (
            Detokenizer(self.tokenizer, params.stop, streaming) if self.tokenizer else None
        )
        if params.stop and detokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and the model directory has none")
        seq = Sequence(seq_id, token_ids, params, detokenizer, Random(seed), time.perf_counter())
        self._scheduler.add(seq)
        return seq

    def step(self) -> Step:
        """Compute one step: bring chosen sequences on, and end those that are done."""
        step = self._scheduler.schedule()
        if not step.num_tokens:
            return step
        try:
            self._compute(step)
        except BaseException:
            # How far each sequence came is not known; those that wait or run beside can go on.
            for seq in [*(seq for seq, _ in step.prefills), *step.decodes]:
                self.abort(seq)
            raise
        return step

    def abort(self, seq: Sequence) -> None:
        """End a request that is not finished, and free its blocks."""
        if seq.status is not Status.FINISHED:
            self._finish(seq, "abort")

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

    def close(self) -> None:
        """Give back the model and its cache. Once closed, closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        for seq in self._scheduler.sequences:
            self.abort(seq)
        del self._runner
        gc.collect()
        self.device.release_cached_memory()

    def _make_runner(self, directory: Path) -> None:
        config, model_config, device = self.config, self.model_config, self.device
        dtype = _dtype(config, model_config, device)
        self._not_finite = f"the logits are not finite: activations overflowed {dtype}"
        if dtype == torch.float16:
            self._not_finite += '. Use dtype="bfloat16" or dtype="float32"'
        policy = create_policy(config.sparse_policy)
        self.backend = backend = resolve_backend(
            config.attention_backend, device.torch_device, dtype, model_config.head_dim
        )
        rotary = RotaryEmbedding(model_config.hf, model_config.head_dim, device.torch_device)
        self.max_model_len, self._length_reason = _max_model_len(config, model_config)
        dummy_seed = config.seed if config.load_format == "dummy" else None
        model = load_model(directory, model_config, dtype, device.torch_device, dummy_seed)
        shape = (model_config.num_kv_heads, model_config.head_dim, dtype)
        block_size = config.kvcache_block_size

        def make_runner(num_blocks: int) -> ModelRunner:
            cache = ResidentKVCache(
                model_config.num_layers, num_blocks, block_size, *shape, device.torch_device
            )
            return ModelRunner(model, rotary, cache, policy, backend, device, self.max_model_len)

        def run_largest_step() -> None:
            num_tokens = min(config.max_num_batched_tokens, self.max_model_len)
            num_blocks = -(-num_tokens // block_size)
            params = SamplingParams(top_p=0.5, repetition_penalty=1.1)
            seq = Sequence(0, [0] * num_tokens, params, None, Random(0), 0.0)
            seq.block_table = list(range(num_blocks))
            logits = make_runner(num_blocks).run(Step(prefills=[(seq, num_tokens)]))
            many = min(config.max_num_seqs, config.max_num_batched_tokens)
            self._sampler.sample(logits.expand(many, -1).clone(), [seq] * many)

        block_bytes = ResidentKVCache.block_bytes(model_config.num_layers, block_size, *shape)
        activation_bytes = device.peak_memory_bytes(run_largest_step)
        num_blocks = plan_kv_cache(
            config, device, block_bytes, self.max_model_len, activation_bytes
        )
        if num_blocks * block_size < self.max_model_len:
            logger.warning(
                "max_model_len %d is bounded to the %d tokens that the KV cache holds",
                self.max_model_len,
                num_blocks * block_size,
            )
            self.max_model_len = num_blocks * block_size
            self._length_reason = (
                f"the KV cache has {num_blocks} blocks of {block_size} tokens; free memory, or "
                "raise num_kvcache_blocks"
            )
        self._runner = make_runner(num_blocks)
        self._scheduler = Scheduler(
            BlockManager(num_blocks, block_size, config.enable_prefix_caching),
            config.max_num_seqs,
            config.max_num_batched_tokens,
        )
        if device.records_graphs and not config.enforce_eager:
            self._runner.capture_graphs(config.max_num_seqs)

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
            self._fail(seq, self._not_finite)
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


def _model_directory(model: str) -> Path:
    if model != "demo":
        return Path(model).expanduser()
    from nanovllm.tools.demo_model import demo_model_path

    return demo_model_path()


def _dtype(config: Config, model_config: ModelConfig, device: Device) -> torch.dtype:
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    checkpoint = getattr(torch, model_config.dtype, None)
    if checkpoint not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"config.json: dtype {model_config.dtype!r} is not supported; pass dtype=..."
        )
    return device.default_dtype or checkpoint


def _max_model_len(config: Config, model_config: ModelConfig) -> tuple[int, str]:
    """Return the most tokens of a sequence, as far as the model decides, and what decided."""
    positions, window = model_config.max_position_embeddings, model_config.sliding_window
    wanted = config.max_model_len
    if window is not None and wanted is not None and wanted > window:
        raise ConfigError(
            f"max_model_len={wanted} exceeds the model's sliding_window of {window}, and attention "
            "within a window is not supported beyond it"
        )
    if wanted is None:
        return min(positions, window or positions), "the model's config.json allows no more"
    if wanted > positions:
        logger.warning(
            "max_model_len %d exceeds the %d positions that the model was made for",
            wanted,
            positions,
        )
    return wanted, "raise max_model_len"
