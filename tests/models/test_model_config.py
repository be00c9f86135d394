"""What config.json may say, and what is refused before any work (CASES C07, C17)."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    assert_same_greedy,
    assert_same_logprobs,
    copy_model,
    generate,
    open_llm,
    prompt_of,
)

from nanovllm import LLM, ConfigError
from nanovllm.models.config import load_model_config

Tiny = Callable[..., Path]

# CASES C07: heads, hidden size; head_dim is what the tests vary.
C07 = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def answer(directory: Path, prompt: list[int], **options: Any) -> list[dict[int, float]]:
    """Generate, compare with transformers, and return the log-probabilities."""
    with open_llm(directory, **options) as llm:
        (output,) = generate(llm, [prompt], 16, logprobs=VOCAB_SIZE)
    assert_same_greedy(output.token_ids, directory, prompt)
    assert_same_logprobs(output.logprobs, output.token_ids, directory, prompt)
    return output.logprobs


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_head_dim_absent_null_or_as_implied(tiny: Tiny, tmp_path: Path, architecture: str) -> None:
    source, prompt = tiny(architecture, **C07, head_dim=64), prompt_of(150)
    logprobs = [
        answer(copy_model(source, tmp_path / str(i), head_dim=head_dim), prompt)
        for i, head_dim in enumerate((..., None, 64))
    ]
    assert logprobs[0] == logprobs[1] == logprobs[2]


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("LlamaForCausalLM", C07 | {"head_dim": 96}),
        ("MistralForCausalLM", C07 | {"head_dim": 96}),
        ("Qwen3ForCausalLM", C07 | {"head_dim": 96}),
        ("Qwen3ForCausalLM", {"num_attention_heads": 2, "head_dim": 128}),
    ],
)
def test_head_dim_decides_the_size_of_the_cache(
    tiny: Tiny, architecture: str, shape: dict[str, int]
) -> None:
    directory = tiny(architecture, **shape)
    answer(directory, prompt_of(150))
    with open_llm(directory, kvcache_block_size=32, num_kvcache_blocks=8) as llm:
        layer = llm.engine._runner._cache.layers[0]
        # The ninth block is scrap.
        assert layer.keys.shape == layer.values.shape == (9, 32, 2, shape["head_dim"])


def test_missing_num_key_value_heads_means_one_for_each(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny(num_key_value_heads=4)
    answer(copy_model(source, tmp_path / "model", num_key_value_heads=...), prompt_of(90))


def test_heads_that_do_not_divide_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    directory = copy_model(tiny(), tmp_path / "model", num_key_value_heads=3)
    with pytest.raises(ConfigError, match=r"num_attention_heads 4 .* num_key_value_heads 3"):
        open_llm(directory)


@pytest.mark.parametrize(
    "architectures", [["GPT2LMHeadModel"], ["LlamaForSequenceClassification"], [], None, ...]
)
def test_unsupported_architecture(tiny: Tiny, tmp_path: Path, architectures: Any) -> None:
    directory = copy_model(tiny(), tmp_path / "model", architectures=architectures)
    named = architectures[0] if architectures not in ([], None, ...) else "none"
    with pytest.raises(ConfigError, match=named) as raised:
        open_llm(directory)
    assert all(supported in str(raised.value) for supported in ARCHITECTURES)


def test_other_activations_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    directory = copy_model(tiny(), tmp_path / "model", hidden_act="gelu")
    with pytest.raises(ConfigError, match="hidden_act 'gelu'"):
        open_llm(directory)


def test_a_value_of_the_wrong_type_is_named(tiny: Tiny, tmp_path: Path) -> None:
    directory = copy_model(tiny(), tmp_path / "model", num_hidden_layers="two")
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        open_llm(directory)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "gptq", "bits": 4},
    ],
)
def test_quantised_checkpoints_are_refused(
    tiny: Tiny, tmp_path: Path, quantization: dict[str, Any]
) -> None:
    """Their scales would be ignored, and the answers be noise."""
    directory = copy_model(tiny(), tmp_path / "model", quantization_config=quantization)
    with pytest.raises(ConfigError, match=f"quantization_config.*{quantization['quant_method']}"):
        open_llm(directory)


# Sliding windows. Attention beyond the window is not built, so the length stops at it.

MISTRAL_WINDOW = {"architecture": "MistralForCausalLM", "sliding_window": 100}
QWEN_WINDOW = {
    "architecture": "Qwen2ForCausalLM",
    "sliding_window": 100,
    "use_sliding_window": True,
    "max_window_layers": 1,
}


@pytest.mark.parametrize("model", [MISTRAL_WINDOW, QWEN_WINDOW], ids=["mistral", "qwen2"])
def test_a_window_bounds_the_length(tiny: Tiny, model: dict[str, Any]) -> None:
    directory = tiny(**model)
    answer(directory, prompt_of(84))
    with open_llm(directory) as llm:
        assert llm.engine.max_model_len == 100
    with pytest.raises(ConfigError, match=r"max_model_len=101 .*sliding_window of 100"):
        open_llm(directory, max_model_len=101)


@pytest.mark.parametrize(
    "model",
    [
        MISTRAL_WINDOW | {"sliding_window": None},
        QWEN_WINDOW | {"use_sliding_window": False},
        QWEN_WINDOW | {"max_window_layers": 2},
        QWEN_WINDOW | {"layer_types": ["full_attention"] * 2},
        {"architecture": "LlamaForCausalLM", "sliding_window": 100},
    ],
    ids=["null", "not_used", "no_layer_left", "layer_types", "not_a_llama_key"],
)
def test_a_window_that_no_layer_has(tiny: Tiny, model: dict[str, Any]) -> None:
    directory = tiny(**model)
    with open_llm(directory) as llm:
        assert llm.engine.max_model_len == 2048
    answer(directory, prompt_of(200))


def test_mistral_slides_whatever_layer_types_say(tiny: Tiny) -> None:
    """As in transformers, whose Mistral does not read the key."""
    directory = tiny(**MISTRAL_WINDOW, layer_types=["full_attention"] * 2)
    with open_llm(directory) as llm:
        assert llm.engine.max_model_len == 100


def test_a_window_hides_what_is_before_it(tiny: Tiny, tmp_path: Path) -> None:
    """Control: had the length not been bounded, the answers would differ."""
    directory, prompt = tiny(**MISTRAL_WINDOW), prompt_of(200)
    without = copy_model(directory, tmp_path / "model", sliding_window=None)
    with open_llm(without) as llm:
        (output,) = generate(llm, [prompt], 8)
    with pytest.raises(AssertionError, match="transformers' is"):
        assert_same_greedy(output.token_ids, directory, prompt)


# CASES C17: paths that are wrong.


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail any attempt to connect, with huggingface_hub believing that it is online."""

    def refuse(*args: object) -> None:
        raise AssertionError(f"a network call: {args}")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def cut_short(directory: Path) -> Path:
    path = directory / "config.json"
    path.write_bytes(path.read_bytes()[:-20])
    return directory


def only_config(directory: Path) -> Path:
    next(directory.glob("*.safetensors")).unlink()
    return directory


def without_config(directory: Path) -> Path:
    (directory / "config.json").unlink()
    return directory


def not_an_object(directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(["LlamaForCausalLM"]))
    return directory


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("path", ["/no/such/dir", "./typo", "org/typo", "~/no/such/dir"])
def test_a_missing_directory_is_named(path: str) -> None:
    shown = str(Path(path).expanduser())
    with pytest.raises(ConfigError, match=f"{shown} does not exist"):
        LLM(path)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_config, "has no config.json"),
        (cut_short, "config.json cannot be read as JSON"),
        (not_an_object, "config.json holds list, not an object"),
        (only_config, r"holds no \*.safetensors file"),
        (lambda directory: directory / "model.safetensors", "is a file; give the directory"),
    ],
    ids=["no_config", "cut_short", "not_an_object", "no_weights", "a_file"],
)
def test_a_spoilt_directory_is_named(
    tiny: Tiny, tmp_path: Path, spoil: Callable[[Path], Path], message: str
) -> None:
    path = spoil(copy_model(tiny(), tmp_path / "model"))
    with pytest.raises(ConfigError, match=message) as raised:
        open_llm(path)
    assert str(tmp_path / "model") in str(raised.value)


@pytest.mark.usefixtures("no_network")
def test_a_good_directory_needs_no_network(tiny: Tiny) -> None:
    with open_llm(tiny()) as llm:
        assert generate(llm, [prompt_of(5)], 3)[0].finish_reason == "length"


def test_a_pathlib_path_and_a_link_are_fine(tiny: Tiny, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tiny())
    assert load_model_config(link).num_layers == 2


def test_code_beside_the_weights_is_not_run(tiny: Tiny, tmp_path: Path) -> None:
    directory = copy_model(
        tiny(), tmp_path / "model", auto_map={"AutoConfig": "trap.Trap"}, model_type="trap"
    )
    (directory / "trap.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_llm(directory)
    assert not (tmp_path / "ran").exists()
