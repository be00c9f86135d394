"""Which tensor of which file a parameter gets, and what is refused.

CASES C10, C11, C13 and C14.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    VOCAB_SIZE,
    assert_same_greedy,
    assert_same_logprobs,
    copy_model,
    generate,
    load_reference,
    open_llm,
    prompt_of,
)

from nanovllm import CapacityError, ConfigError, RequestOutput
from nanovllm.device.cpu import CpuDevice
from nanovllm.models.loader import WeightFiles

Tiny = Callable[..., Path]
Weights = dict[str, torch.Tensor]

PROMPT = prompt_of(90)
INDEX = "model.safetensors.index.json"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def answer(directory: Path, **options: Any) -> RequestOutput:
    with open_llm(directory, **options) as llm:
        return generate(llm, [PROMPT], 12, logprobs=VOCAB_SIZE)[0]


def assert_answers_like(directory: Path, truth: Path) -> None:
    """Assert that nanovllm on `directory` answers as transformers does on `truth`."""
    output = answer(directory)
    assert_same_greedy(output.token_ids, truth, PROMPT)
    assert_same_logprobs(output.logprobs, output.token_ids, truth, PROMPT)


def write(path: Path, weights: Weights) -> None:
    save_file({k: v.contiguous() for k, v in weights.items()}, path, metadata={"format": "pt"})


def change_weights(directory: Path, change: Callable[[Weights], object]) -> Path:
    """Change the tensors of a single-file checkpoint in place."""
    path = directory / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(weights)
    write(path, weights)
    return directory


def noise_like(weights: Weights) -> Weights:
    """Return other values for the same names."""
    return {name: tensor.flip(0) + 1 for name, tensor in weights.items()}


@pytest.fixture
def sharded(tiny: Tiny, tmp_path: Path) -> Path:
    """A checkpoint in several files, to be changed by the test."""
    directory = copy_model(tiny(max_shard_size="100KB"), tmp_path / "sharded")
    assert len(shards_of(directory)) >= 3
    return directory


def shards_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*-of-*.safetensors"))


# Single and sharded files.


def test_sharded_equals_single(sharded: Path, tiny: Tiny) -> None:
    assert_answers_like(sharded, tiny())


def test_shards_without_their_index(sharded: Path, tiny: Tiny) -> None:
    (sharded / INDEX).unlink()
    assert_answers_like(sharded, tiny())


def test_one_file_of_another_name(tiny: Tiny, tmp_path: Path) -> None:
    directory = copy_model(tiny(), tmp_path / "model")
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    assert_answers_like(directory, tiny())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_widened(tiny: Tiny, dtype: torch.dtype) -> None:
    directory = tiny(dtype=dtype)
    assert_answers_like(directory, directory)


# Tied and untied heads (C10, C11).


def head_left_out(weights: Weights) -> None:
    weights.pop(HEAD, None)


def head_alike(weights: Weights) -> None:
    weights[HEAD] = weights[EMBED].clone()


def head_unlike(weights: Weights) -> None:
    weights[HEAD] = weights[EMBED].flip(0)


def only_head(weights: Weights) -> None:
    weights[HEAD] = weights.pop(EMBED)


@pytest.mark.parametrize("change", [head_left_out, head_alike, head_unlike, only_head])
def test_a_tied_head(tiny: Tiny, tmp_path: Path, change: Callable[[Weights], None]) -> None:
    directory = copy_model(tiny(tie_word_embeddings=True), tmp_path / "model")
    change_weights(directory, change)
    assert_answers_like(directory, directory)
    # Control: transformers does tell an unlike head from one that is tied.
    tied = load_reference(directory).get_output_embeddings().weight
    is_tied = torch.equal(tied, load_reference(directory).get_input_embeddings().weight)
    assert is_tied == (change is not head_unlike)


@pytest.mark.parametrize("tie_word_embeddings", [False, ...])
def test_an_untied_head(tiny: Tiny, tmp_path: Path, tie_word_embeddings: Any) -> None:
    directory = copy_model(tiny(), tmp_path / "model", tie_word_embeddings=tie_word_embeddings)
    assert_answers_like(directory, tiny())


@pytest.mark.parametrize("tie_word_embeddings", [False, ...])
def test_an_untied_head_that_is_missing(
    tiny: Tiny, tmp_path: Path, tie_word_embeddings: Any
) -> None:
    directory = copy_model(tiny(), tmp_path / "model", tie_word_embeddings=tie_word_embeddings)
    change_weights(directory, head_left_out)
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        open_llm(directory)


# Files that do not belong (C13).


@pytest.mark.parametrize("sharding", ["sharded", "single"])
@pytest.mark.parametrize(
    "stray",
    ["a-old", "z-old", "consolidated", "model-00001-of-00009", "optimizer", "pytorch_model"],
)
def test_stray_files_are_not_read(tiny: Tiny, tmp_path: Path, sharding: str, stray: str) -> None:
    options = {"max_shard_size": "100KB"} if sharding == "sharded" else {}
    directory = copy_model(tiny(**options), tmp_path / "model")
    weights = load_file(tiny() / "model.safetensors")
    write(directory / f"{stray}.safetensors", noise_like(weights))
    assert_answers_like(directory, tiny())


@pytest.mark.parametrize("place", [0, -1])
def test_a_stale_copy_in_another_shard(sharded: Path, tiny: Tiny, place: int) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    shard = shards_of(sharded)[place]
    stale = {
        name: tensor
        for name, tensor in noise_like(load_file(tiny() / "model.safetensors")).items()
        if weight_map[name] != shard.name
    }
    assert stale
    write(shard, load_file(shard) | stale)
    assert_answers_like(sharded, tiny())


def test_the_index_counts_though_there_is_a_single_file(sharded: Path, tiny: Tiny) -> None:
    weights = load_file(tiny() / "model.safetensors")
    write(sharded / "model.safetensors", noise_like(weights))
    assert_answers_like(sharded, tiny())


def test_two_values_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    first, *_, last = shards_of(sharded)
    name, stale = next(iter(noise_like(load_file(first)).items()))
    write(last, load_file(last) | {name: stale})
    with pytest.raises(ConfigError, match=f"'{name}' is that of {first.name} or {last.name}"):
        open_llm(sharded)


def test_two_sets_of_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    write(sharded / "model-00001-of-00001.safetensors", load_file(shards_of(sharded)[0]))
    with pytest.raises(ConfigError, match=r"which of model-00001-of-00001\.safetensors, "):
        open_llm(sharded)


def test_extra_tensors_are_ignored(tiny: Tiny, tmp_path: Path) -> None:
    directory = copy_model(tiny(), tmp_path / "model")
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(directory, lambda weights: weights.update({extra: torch.ones(16)}))
    assert_answers_like(directory, tiny())


def test_unnamed_files_are_not_guessed_at(tiny: Tiny, tmp_path: Path) -> None:
    directory = copy_model(tiny(), tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    write(directory / "a.safetensors", weights)
    write(directory / "b.safetensors", noise_like(weights))
    with pytest.raises(ConfigError, match=r"a\.safetensors, b\.safetensors"):
        open_llm(directory)


# What is missing or damaged (C14).

LAYER = "model.layers.1"


@pytest.mark.parametrize(
    "name",
    [
        EMBED,
        "model.norm.weight",
        f"{LAYER}.input_layernorm.weight",
        f"{LAYER}.self_attn.k_proj.weight",
        f"{LAYER}.self_attn.k_proj.bias",
        f"{LAYER}.self_attn.o_proj.weight",
        f"{LAYER}.self_attn.q_norm.weight",
        f"{LAYER}.mlp.up_proj.weight",
        f"{LAYER}.mlp.down_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(tiny: Tiny, tmp_path: Path, name: str) -> None:
    source = tiny("Qwen3ForCausalLM", attention_bias=True)
    directory = copy_model(source, tmp_path / "model")
    change_weights(directory, lambda weights: weights.pop(name))
    with pytest.raises(ConfigError, match=f"lacks tensors .*: {name}$"):
        open_llm(directory)


def test_many_missing_tensors_are_counted(tiny: Tiny, tmp_path: Path) -> None:
    directory = copy_model(tiny(), tmp_path / "model", num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"model\.layers\.2\..* and 13 more"):
        open_llm(directory)


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_missing_shard_is_named(sharded: Path, place: int, with_index: bool) -> None:
    shard = shards_of(sharded)[place]
    shard.unlink()
    if not with_index:
        (sharded / INDEX).unlink()
    with pytest.raises(ConfigError, match=f"lacks the weight files {shard.name}$"):
        open_llm(sharded)


def test_a_shard_without_what_the_index_says(sharded: Path) -> None:
    shard = shards_of(sharded)[1]
    weights = load_file(shard)
    name, _ = weights.popitem()
    write(shard, weights)
    with pytest.raises(ConfigError, match=f"{shard.name}.*{name}"):
        open_llm(sharded)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"lm_head.weight": 1}}']
)
def test_a_damaged_index_is_named(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    with pytest.raises(ConfigError, match=f"{INDEX} is not a valid index"):
        open_llm(sharded)


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        ({"num_key_value_heads": 4}, "k_proj.weight"),
        ({"intermediate_size": 128}, "gate_proj.weight"),
        ({"vocab_size": VOCAB_SIZE + 1}, "embed_tokens.weight"),
        ({"vocab_size": VOCAB_SIZE - 1}, "embed_tokens.weight"),
        ({"head_dim": 16}, "q_proj.weight"),
    ],
)
def test_a_shape_that_the_config_contradicts(
    tiny: Tiny, tmp_path: Path, edit: dict[str, int], name: str
) -> None:
    directory = copy_model(tiny(), tmp_path / "model", **edit)
    with pytest.raises(ConfigError, match=rf"{name}' has shape \(.*\), but config.json implies \("):
        open_llm(directory)


def as_pointer(path: Path) -> None:
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        f"oid sha256:{'0' * 64}\nsize {path.stat().st_size}\n"
    )


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def a_web_page(path: Path) -> None:
    path.write_text("<!DOCTYPE html><html><title>404</title></html>")


@pytest.mark.parametrize("sharding", ["sharded", "single"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (as_pointer, "git-lfs pointer"),
        (cut_in_half, "damaged or cut short"),
        (emptied, "damaged or cut short"),
        (a_web_page, "damaged or cut short"),
    ],
)
def test_a_spoilt_file_is_named(
    tiny: Tiny, tmp_path: Path, sharding: str, spoil: Callable[[Path], None], message: str
) -> None:
    options = {"max_shard_size": "100KB"} if sharding == "sharded" else {}
    directory = copy_model(tiny(**options), tmp_path / "model")
    path = sorted(directory.glob("*.safetensors"))[-1]
    spoil(path)
    with pytest.raises(ConfigError, match=f"{path.name} is .*{message}|{path.name} is {message}"):
        open_llm(directory)


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_a_pickle_is_never_opened(tiny: Tiny, tmp_path: Path) -> None:
    directory, sprung = copy_model(tiny(), tmp_path / "model"), tmp_path / "sprung"
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin .*never opened.*safetensors"):
        open_llm(directory)
    assert not sprung.exists()
    with pickle.loads((directory / "pytorch_model.bin").read_bytes()):  # control: it would have
        assert sprung.exists()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantised_tensors_are_refused(tiny: Tiny, tmp_path: Path, dtype: torch.dtype) -> None:
    """What such numbers mean lies in scales that are not read."""
    directory, name = copy_model(tiny(), tmp_path / "model"), f"{LAYER}.mlp.up_proj.weight"
    change_weights(directory, lambda weights: weights.update({name: weights[name].to(dtype)}))
    with pytest.raises(ConfigError, match=f"{name}.*{str(dtype).removeprefix('torch.')}"):
        open_llm(directory)


# Dummy weights.


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_dummy_weights(tiny: Tiny, tmp_path: Path, architecture: str) -> None:
    directory = copy_model(tiny(architecture, tie_word_embeddings=True), tmp_path / "model")
    (directory / "model.safetensors").unlink()
    first, again, other = (answer(directory, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert len(first.token_ids) == 12
    assert first.logprobs == again.logprobs
    assert first.logprobs != other.logprobs


def test_weights_that_do_not_fit_are_refused_before_any_is_read(tiny, monkeypatch):
    monkeypatch.setattr(CpuDevice, "free_memory_bytes", lambda self: 1000)
    monkeypatch.setattr(WeightFiles, "read", None)
    with pytest.raises(CapacityError, match=r"weights need .* GiB in torch.float32"):
        open_llm(tiny())
