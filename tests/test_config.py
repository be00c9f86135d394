"""An option that does not exist, or a value that it may not have, is refused by its name."""

import ast
import dataclasses
import inspect
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import nanovllm
from nanovllm import LLM, ConfigError, SparsePolicyType
from nanovllm.config import Config

NAMES = [field.name for field in dataclasses.fields(Config)]


def test_unknown_option_lists_the_valid_ones():
    with pytest.raises(ConfigError) as refused:
        LLM("model", max_model_length=9)
    message = str(refused.value)
    assert "unknown option 'max_model_length': did you mean 'max_model_len'?" in message
    assert message.endswith(", ".join(name for name in NAMES if name != "model"))


def test_unknown_option_like_no_other():
    with pytest.raises(ConfigError, match=r"unknown option 'zzz'\. Options: dtype, device"):
        Config.from_options("model", {"zzz": 1})


INVALID = [
    ("dtype", "int8"),
    ("dtype", None),
    ("dtype", torch.int64),
    ("device", "tpu"),
    ("device", "cpu:1"),
    ("device", "cuda:"),
    ("device", "cuda:one"),
    ("max_model_len", 0),
    ("max_model_len", 10.0),
    ("max_num_seqs", 0),
    ("max_num_seqs", None),
    ("max_num_seqs", True),
    ("max_num_batched_tokens", -1),
    ("max_num_batched_tokens", "8192"),
    ("gpu_memory_utilization", 0),
    ("gpu_memory_utilization", 1.01),
    ("gpu_memory_utilization", math.nan),
    ("gpu_memory_utilization", "0.9"),
    ("kvcache_block_size", 0),
    ("kvcache_block_size", 24),
    ("num_kvcache_blocks", 0),
    ("num_kvcache_blocks", -2),
    ("enforce_eager", "yes"),
    ("enforce_eager", None),
    ("tensor_parallel_size", 2),
    ("tensor_parallel_size", 0),
    ("seed", None),
    ("seed", "0"),
    ("attention_backend", "xformers"),
    ("load_format", "pt"),
    ("enable_prefix_caching", 1),
    ("sparse_policy", "dense"),
    ("sparse_policy", None),
    ("decode_policy", "dense"),
    ("sparse_threshold", 11),
    ("sparse_threshold", math.nan),
    ("sparse_estimator", "diagonal"),
    ("sparse_stride", 4),
    ("sparse_guard", 1.5),
    ("sparse_guard", 0),
    ("sparse_chunk_size", 1000),
    ("sparse_vote_threshold", -0.5),
    ("sparse_dense_layers", -1),
    ("sparse_min_len", None),
    ("decode_token_budget", 127),
    ("decode_page_size", 48),
    ("decode_estimator", "signs"),
    ("decode_prefetch", 1.1),
    ("decode_hot_cache_gb", -1),
    ("sparse_topk_blocks", 0),
    ("sparse_threshold_blocks", -1),
    ("enable_offload", 1),
    ("cpu_memory_gb", -1),
    ("cpu_memory_gb", "8"),
    ("cpu_memory_gb", float("inf")),
    ("num_gpu_blocks", 1),
    ("num_gpu_blocks", 2.0),
    ("prefill_order", "layers"),
    ("enable_nvtx", "yes"),
]


@pytest.mark.parametrize(("name", "value"), INVALID, ids=repr)
def test_invalid_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name}="):
        Config(model="model", **{name: value})


def test_every_option_has_an_invalid_value_above():
    assert {name for name, _ in INVALID} == set(NAMES) - {"model"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("dtype", torch.bfloat16, "bfloat16"),
        ("dtype", "float16", "float16"),
        ("device", torch.device("cuda", 1), "cuda:1"),
        ("device", "cuda:12", "cuda:12"),
        ("num_kvcache_blocks", -1, None),
        ("max_num_seqs", 1, 1),
        ("gpu_memory_utilization", 1, 1),
        ("kvcache_block_size", 16, 16),
        ("sparse_policy", "full", SparsePolicyType.FULL),
        ("sparse_policy", nanovllm.FULL, SparsePolicyType.FULL),
        ("decode_policy", "full", SparsePolicyType.FULL),
        ("model", Path("some/model"), "some/model"),
    ],
    ids=repr,
)
def test_valid_value_in_its_one_form(name, value, expected):
    assert getattr(Config(**{"model": "model", name: value}), name) == expected


@pytest.mark.parametrize(("given", "read"), [(9, 0.9), (9.5, 0.95), (10, 1.0), (1, 1), (0.9, 0.9)])
def test_thresholds_above_one_are_tenths(given, read):
    config = Config(model="model", sparse_policy="XATTN_BSA", sparse_threshold=given)
    assert config.sparse_threshold == read


def test_options_that_nothing_reads_are_refused():
    with pytest.raises(ConfigError, match="sparse_stride=16 is for sparse_policy=XATTN_BSA"):
        Config(model="model", sparse_stride=16)
    assert Config(model="model", sparse_policy="xattn_bsa", sparse_stride=16).sparse_stride == 16
    ahead = {"model": "model", "decode_policy": "QUEST", "decode_prefetch": 0.25}
    with pytest.raises(ConfigError, match=r"decode_prefetch=0\.25 is for a KV cache"):
        Config(**ahead)
    assert Config(**ahead, enable_offload=True).decode_prefetch == 0.25


def test_frozen():
    config = Config(model="model")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dtype = "float16"
    with pytest.raises(TypeError):
        Config("model")


@pytest.mark.parametrize("cls", [Config, nanovllm.SamplingParams])
def test_every_field_says_what_it_is(cls):
    """A sentence below each field; docs/config.md is made of them."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    documented = {
        field.target.id
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and str(below.value.value).endswith(".")
    }
    assert documented == {field.name for field in dataclasses.fields(cls)}
