"""The engine's options: one frozen dataclass, checked before any work starts."""

import difflib
import math
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from nanovllm.errors import ConfigError
from nanovllm.kvcache.page_budget import PageEstimator
from nanovllm.kvcache.sparse.registry import SparsePolicyType, parse_policy
from nanovllm.log import get_logger

if TYPE_CHECKING:
    from nanovllm.kvcache.sparse.policy import SparsePolicy

logger = get_logger(__name__)

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
PrefillOrder = Literal["auto", "layer", "chunk"]
SparseEstimator = Literal["group", "row"]
AttentionBackendName = Literal["auto", "fa4", "fa2", "cudnn", "flash", "flex", "torch"]
_TILE = 128  # tokens along either side of a tile of the attention mask
_STRIDES = {"group": (4, 8, 16), "row": (8, 16, 32, 64)}
_PAGE_SIZES = (16, 32, 64, 128)
_OFFLOAD_ONLY = (
    "cpu_memory_gb",
    "num_gpu_blocks",
    "prefill_order",
    "enable_nvtx",
    "decode_prefetch",
)
_XATTN_ONLY = (
    "sparse_threshold",
    "sparse_estimator",
    "sparse_stride",
    "sparse_guard",
    "sparse_chunk_size",
    "sparse_vote_threshold",
    "sparse_dense_layers",
    "sparse_min_len",
)
_QUEST_ONLY = (
    "decode_token_budget",
    "decode_page_size",
    "decode_estimator",
    "decode_prefetch",
    "sparse_topk_blocks",
    "sparse_threshold_blocks",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Options of `LLM(model, **options)`. Names and meaning follow vLLM and nano-vllm."""

    model: str
    """Directory of a Hugging Face checkpoint (safetensors), or `"demo"`."""
    dtype: DType = "auto"
    """Type of weights, activations and KV cache. `auto`: the checkpoint's on a GPU; on a CPU
    bfloat16 where it has AMX tiles, else float32."""
    device: str = "auto"
    """`cuda`, `cuda:N` or `cpu`. `auto`: CUDA if there is a GPU, else CPU."""
    max_model_len: int | None = None
    """Most tokens of one request, prompt and answer together. None: what the model's positions
    allow. Always bounded by what the KV cache can hold."""
    max_num_seqs: int = 256
    """Most requests that run at once; >= 1."""
    max_num_batched_tokens: int = 16384
    """Most tokens that one step computes, so the length of a prefill chunk; >= 1."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that weights, activations and KV cache may take; in (0, 1]."""
    kvcache_block_size: int | None = None
    """Tokens in a KV block, the unit of allocation, prefix caching and transfer. None: 256, a
    multiple of 16 otherwise; with offload 1024, a multiple of 128 otherwise."""
    num_kvcache_blocks: int | None = None
    """KV blocks in the pool. None (or -1): what memory allows, on a CPU a quarter of what is
    free. With offload the pool is in host memory, see `cpu_memory_gb`."""
    enforce_eager: bool = False
    """Whether to run decode steps without CUDA graphs."""
    tensor_parallel_size: int = 1
    """GPUs that share the model. Only 1 is built."""
    seed: int = 0
    """Seeds requests without a seed of their own, and dummy weights."""
    attention_backend: AttentionBackendName = "auto"
    """Kernel of dense attention. `auto` takes the first that has no reason against it and logs it;
    a named one is used or refused, never replaced."""
    load_format: LoadFormat = "auto"
    """`auto` reads safetensors. `dummy` draws random weights for a `config.json`, to benchmark."""
    enable_prefix_caching: bool = True
    """Whether requests that begin alike share the KV blocks of what they share."""
    sparse_policy: "SparsePolicyType | SparsePolicy" = SparsePolicyType.FULL
    """Which attention a prefill computes: a `SparsePolicyType`, its name in any case, or a
    `SparsePolicy` object. Decode uses it too if it can; see `decode_policy`."""
    decode_policy: "SparsePolicyType | SparsePolicy | None" = None
    """Which attention decode computes. None: `sparse_policy`, or `FULL` if that has no decode."""
    sparse_threshold: float | None = None
    """With XATTN_BSA, the share of a query tile's estimated attention mass that its kept tiles
    hold, in [0, 1]; 1 is dense attention. From above 1 to 10 it is read as tenths: 9 is 0.9.
    None: 0.85 for the estimator `row`, 0.95 for `group`."""
    sparse_estimator: SparseEstimator = "row"
    """With XATTN_BSA, how the mass is estimated. `row`: a softmax for each query row, over every
    `sparse_stride`-th key. `group`: XAttention's antidiagonal sums over groups of `sparse_stride`
    tokens."""
    sparse_stride: int | None = None
    """With XATTN_BSA, the estimate's stride: 8, 16, 32 or 64 for `row`, 4, 8 or 16 for `group`. The
    estimate costs 1 / (2 * stride) of dense attention's arithmetic. None: 16 for `row`, 8 for
    `group`."""
    sparse_guard: float | None = None
    """With XATTN_BSA, keep also every tile into which some row of the estimate puts more than this
    share of its mass, in (0, 1]; 1 is no guard. None: 0.5 for `row`, 1 for `group`."""
    sparse_chunk_size: int = 16384
    """With XATTN_BSA, queries that are estimated at a time, a multiple of 128; bounds the memory
    that an estimate takes. Smaller ones are slower."""
    sparse_vote_threshold: float = 0.0
    """With XATTN_BSA, drop the KV blocks of the history that no more than this share of (KV head,
    query tile) pairs want, in [0, 1]; the first and last stay. 0: drop none. 0.5 is a majority
    vote, which saves copies from host memory and loses what few heads need."""
    sparse_dense_layers: int = 0
    """With XATTN_BSA, how many layers, from the first on, attend densely; >= 0."""
    sparse_min_len: int = 4096
    """With XATTN_BSA, tokens at positions before this attend densely, since selection would cost
    more than it saves; >= 0."""
    decode_token_budget: int = 4096
    """With decode_policy=QUEST, tokens of its context that each KV head attends to in a step, in
    whole pages; >= 2 * decode_page_size."""
    decode_page_size: int = 64
    """With decode_policy=QUEST, tokens that are chosen together, 16, 32, 64 or 128. Small pages are
    chosen better; the index of the keys takes 1 / page size of the cache's bytes, on the device."""
    decode_estimator: PageEstimator = "codes"
    """With decode_policy=QUEST, by what pages are chosen. `codes`: their attention mass, by keys in
    2 bits a channel, which take another 1/16 of the cache's bytes. `bounds`: Quest's bound of their
    logits, by the least and the greatest value of each channel."""
    decode_prefetch: float = 0.0
    """With decode_policy=QUEST and offload, the share of the budget that is fetched while the MLP
    before a layer is computed, by what its query would be without that MLP; in [0, 1]. It pays with
    a large budget of which little stays on the device: each layer chooses pages twice."""
    decode_hot_cache_gb: float | None = None
    """With decode_policy=QUEST and offload, GiB of device memory for pages that recent steps used,
    shared out among the requests that may run at once; 0 keeps none from step to step. None: four
    times what a step attends to, less where that is a quarter of what is free, on a CPU once."""
    sparse_topk_blocks: int | None = None
    """With decode_policy=QUEST, the budget in KV blocks; takes the place of
    `decode_token_budget`."""
    sparse_threshold_blocks: int = 0
    """With decode_policy=QUEST, attend to all of a context of at most so many KV blocks; >= 0."""
    enable_offload: bool = False
    """Whether the KV cache lies in host memory and passes through a ring of slots on the device.
    Requests then run one at a time, with decode_policy=QUEST up to 8."""
    cpu_memory_gb: float | None = None
    """GiB of host memory that the KV cache may grow to, with offload; at least one block. None:
    half of what is free, on a CPU a quarter."""
    num_gpu_blocks: int | None = None
    """Slots of the ring, each of one KV block of one layer, with offload; >= 2. None: slots for
    65,536 tokens, fewer where requests are short."""
    prefill_order: PrefillOrder = "auto"
    """With offload, the order of a prompt longer than `max_num_batched_tokens`. `layer`: all its
    chunks in a layer before the next layer, which reads nothing back from the host and keeps the
    prompt's hidden states on the device. `chunk`: all layers of a chunk before the next chunk.
    `auto`: `layer` if it fits and no other request decodes, which would have to wait."""
    enable_nvtx: bool = False
    """Whether a profiler is shown each layer and chunk by name, with offload."""

    def __post_init__(self) -> None:
        def normalise(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        normalise("model", str(self.model))
        normalise("dtype", str(self.dtype).removeprefix("torch."))
        normalise("device", str(self.device))
        normalise("sparse_policy", parse_policy(self.sparse_policy))
        if self.decode_policy is not None:
            normalise("decode_policy", parse_policy(self.decode_policy, "decode_policy"))
        if self.num_kvcache_blocks == -1:
            normalise("num_kvcache_blocks", None)
        if self.kvcache_block_size is None:
            normalise("kvcache_block_size", 1024 if self.enable_offload else 256)
        _one_of("dtype", self.dtype, get_args(DType))
        _one_of("load_format", self.load_format, get_args(LoadFormat))
        _one_of("prefill_order", self.prefill_order, get_args(PrefillOrder))
        _one_of("attention_backend", self.attention_backend, get_args(AttentionBackendName))
        for name in ("max_num_seqs", "max_num_batched_tokens", "kvcache_block_size"):
            _at_least_one(name, getattr(self, name))
        for name in ("max_model_len", "num_kvcache_blocks"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        if self.block_size % 16 or (self.enable_offload and self.block_size % _TILE):
            unit, why = (_TILE, ", as offload needs") if self.enable_offload else (16, "")
            raise ConfigError(
                f"kvcache_block_size={self.block_size} is not a multiple of {unit}{why}"
            )
        for name in ("enforce_eager", "enable_prefix_caching", "enable_offload", "enable_nvtx"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} is not True or False")
        if not isinstance(self.seed, int):
            raise ConfigError(f"seed={self.seed!r} is not an integer")
        self._check_offload()
        self._check_sparse()
        self._check_quest()
        share = self.gpu_memory_utilization
        if not (isinstance(share, (int, float)) and 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization={share!r} is not a number in (0, 1]")
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size}: only 1 is built so far"
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device={self.device!r} is none of auto, cpu, cuda, cuda:N")

    @property
    def block_size(self) -> int:
        """`kvcache_block_size`, with its default in place."""
        assert self.kvcache_block_size is not None
        return self.kvcache_block_size

    def _check_offload(self) -> None:
        slots = self.num_gpu_blocks
        if slots is not None:
            _at_least_one("num_gpu_blocks", slots)
            if slots < 2:
                raise ConfigError("num_gpu_blocks=1: one slot loads while another is read, so >= 2")
        _gib("cpu_memory_gb", self.cpu_memory_gb)
        if not self.enable_offload:
            self._refuse(_OFFLOAD_ONLY, "a KV cache in host memory: set enable_offload=True")

    def _check_sparse(self) -> None:
        threshold = self.sparse_threshold
        if threshold is not None and _number("sparse_threshold", threshold, 0, 10) > 1:
            threshold /= 10
            logger.info(
                "sparse_threshold=%s is read as tenths: %s", self.sparse_threshold, threshold
            )
        object.__setattr__(self, "sparse_threshold", threshold)
        _one_of("sparse_estimator", self.sparse_estimator, get_args(SparseEstimator))
        strides = _STRIDES[self.sparse_estimator]
        if self.sparse_stride is not None and self.sparse_stride not in strides:
            raise ConfigError(
                f"sparse_stride={self.sparse_stride!r} is none of "
                f"{', '.join(map(str, strides))} of sparse_estimator={self.sparse_estimator!r}"
            )
        if self.sparse_guard is not None and not _number("sparse_guard", self.sparse_guard) > 0:
            raise ConfigError(f"sparse_guard={self.sparse_guard!r} is not a number in (0, 1]")
        _number("sparse_vote_threshold", self.sparse_vote_threshold)
        _at_least("sparse_dense_layers", self.sparse_dense_layers, 0)
        _at_least("sparse_min_len", self.sparse_min_len, 0)
        _at_least("sparse_chunk_size", self.sparse_chunk_size, _TILE)
        if self.sparse_chunk_size % _TILE:
            raise ConfigError(
                f"sparse_chunk_size={self.sparse_chunk_size} is not a multiple of {_TILE}"
            )
        if self.sparse_policy is not SparsePolicyType.XATTN_BSA:
            self._refuse(_XATTN_ONLY, "sparse_policy=XATTN_BSA")

    def _check_quest(self) -> None:
        if self.decode_page_size not in _PAGE_SIZES:
            sizes = ", ".join(map(str, _PAGE_SIZES))
            raise ConfigError(f"decode_page_size={self.decode_page_size!r} is none of {sizes}")
        _one_of("decode_estimator", self.decode_estimator, get_args(PageEstimator))
        _at_least("decode_token_budget", self.decode_token_budget, 2 * self.decode_page_size)
        if self.sparse_topk_blocks is not None:
            _at_least_one("sparse_topk_blocks", self.sparse_topk_blocks)
        _at_least("sparse_threshold_blocks", self.sparse_threshold_blocks, 0)
        _number("decode_prefetch", self.decode_prefetch)
        _gib("decode_hot_cache_gb", self.decode_hot_cache_gb)
        is_quest = self.decode_policy is SparsePolicyType.QUEST
        if not is_quest:
            self._refuse(_QUEST_ONLY, "decode_policy=QUEST")
        chooses_pages = is_quest or getattr(self.decode_policy, "pages", None) is not None
        if self.decode_hot_cache_gb is not None and not (chooses_pages and self.enable_offload):
            raise ConfigError(
                f"decode_hot_cache_gb={self.decode_hot_cache_gb!r} is for pages of a KV cache in "
                "host memory: set decode_policy=QUEST and enable_offload=True"
            )

    def _refuse(self, names: tuple[str, ...], what_for: str) -> None:
        """Refuse options that are set although nothing reads them."""
        unset = {field.name: field.default for field in fields(self)}
        for name in names:
            if getattr(self, name) != unset[name]:
                raise ConfigError(f"{name}={getattr(self, name)!r} is for {what_for}")

    @classmethod
    def from_options(cls, model: object, options: dict[str, Any]) -> "Config":
        """Make the config of `LLM(model, **options)`.

        Raises:
            ConfigError: an option is unknown (the message lists those that exist) or invalid.
        """
        valid = [field.name for field in fields(cls) if field.name != "model"]
        for name in options:
            if name not in valid:
                close = difflib.get_close_matches(name, valid, n=1)
                hint = f": did you mean {close[0]!r}?" if close else "."
                raise ConfigError(f"unknown option {name!r}{hint} Options: {', '.join(valid)}")
        return cls(model=str(model), **options)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is none of {', '.join(allowed)}")


def _at_least_one(name: str, value: object) -> None:
    _at_least(name, value, 1)


def _at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} is not an integer >= {least}")


def _gib(name: str, value: float | None) -> None:
    if value is None:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 0 <= value < math.inf):
        raise ConfigError(f"{name}={value!r} is not a number of GiB")


def _number(name: str, value: object, least: float = 0, most: float = 1) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ConfigError(f"{name}={value!r} is not a number in [{least}, {most}]")
    return value
