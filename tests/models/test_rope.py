"""Rotary scalings in every spelling that config.json knows (CASES C01, C02, C04, C05)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    NEAR_TIE,
    VOCAB_SIZE,
    assert_same_greedy,
    assert_same_logprobs,
    copy_model,
    generate,
    load_reference,
    open_llm,
    prompt_of,
)

from nanovllm import ConfigError
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.config import load_model_config

Tiny = Callable[..., Path]
Variant = Callable[..., Path]

THETA = 5000.0
ORIGINAL = 64
LENGTH = 1024  # of the scaled model

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
# A spelling of rotary parameters: keys of config.json. Others that could hold them are dropped.
LLAMA3_SPELLINGS = {
    "rope_parameters": {"rope_parameters": {"rope_type": "llama3", "rope_theta": THETA, **LLAMA3}},
    "rope_type": {"rope_theta": THETA, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "type": {"rope_theta": THETA, "rope_scaling": {"type": "llama3", **LLAMA3}},
    "both": {
        "rope_theta": THETA,
        "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3},
    },
}
UNSCALED = {"rope_theta": THETA, "rope_scaling": None}

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
PLAIN_FACTOR = 0.1 * math.log(8) + 1  # YaRN, section 3.4
# What is added to YARN, the attention factor that must follow, whether the angles stay as they are.
YARN_VARIANTS: dict[str, tuple[dict[str, Any], float, bool]] = {
    "plain": ({}, PLAIN_FACTOR, True),
    "pair": ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, True),
    "mscale_alone": ({"mscale": 2.0}, PLAIN_FACTOR, True),
    "mscale_all_dim_alone": ({"mscale_all_dim": 2.0}, PLAIN_FACTOR, True),
    "attention_factor": ({"attention_factor": 0.8}, 0.8, True),
    "explicit_wins": ({"attention_factor": 0.8, "mscale": 1.0, "mscale_all_dim": 1.0}, 0.8, True),
    "betas": ({"beta_fast": 8.0, "beta_slow": 2.0}, PLAIN_FACTOR, False),
    "untruncated": ({"truncate": False}, PLAIN_FACTOR, False),
}


@pytest.fixture
def variant(tiny: Tiny, tmp_path: Path) -> Variant:
    """Return a function that makes the same weights with other rotary keys in config.json."""
    source = tiny(max_position_embeddings=LENGTH)

    def make(name: str, keys: dict[str, Any]) -> Path:
        nothing = {"rope_parameters": ..., "rope_theta": ..., "rope_scaling": ...}
        return copy_model(source, tmp_path / name, **nothing | keys)

    return make


def logprobs_of(directory: Path, prompt: list[int]) -> torch.Tensor:
    """Generate in chunks, compare with transformers, and return the first token's logprobs."""
    with open_llm(directory, max_num_batched_tokens=150) as llm:
        (output,) = generate(llm, [prompt], 12, logprobs=VOCAB_SIZE)
    assert_same_greedy(output.token_ids, directory, prompt)
    assert_same_logprobs(output.logprobs, output.token_ids, directory, prompt)
    return torch.tensor([output.logprobs[0][i] for i in range(VOCAB_SIZE)])


def rotary_of(directory: Path) -> RotaryEmbedding:
    config = load_model_config(directory)
    return RotaryEmbedding(config.hf, config.head_dim, torch.device("cpu"))


@pytest.mark.parametrize(
    "keys",
    [UNSCALED, LLAMA3_SPELLINGS["type"], {"rope_parameters": {"rope_theta": THETA, **YARN}}],
    ids=["default", "llama3", "yarn"],
)
def test_angles_are_those_of_transformers_to_the_bit(
    variant: Variant, keys: dict[str, Any]
) -> None:
    directory = variant("model", keys)
    positions = torch.tensor([0, 1, 63, 64, 1000, 65_535, 1_000_000])
    theirs = load_reference(directory).model.rotary_emb(torch.zeros(1), positions[None])
    for ours, expected in zip(rotary_of(directory).angles(positions), theirs, strict=True):
        assert torch.equal(torch.cat((ours, ours), dim=-1), expected[0])


def test_llama3_in_every_spelling(variant: Variant) -> None:  # C01
    prompt = prompt_of(400)
    scaled = [logprobs_of(variant(name, keys), prompt) for name, keys in LLAMA3_SPELLINGS.items()]
    assert all(torch.equal(other, scaled[0]) for other in scaled)
    unscaled = logprobs_of(variant("unscaled", UNSCALED), prompt)
    assert (scaled[0] - unscaled).abs().max() > 100 * NEAR_TIE


def test_llama3_turns_long_waves_slower(variant: Variant) -> None:  # C01
    scaled = rotary_of(variant("scaled", LLAMA3_SPELLINGS["type"])).inv_freq
    unscaled = rotary_of(variant("unscaled", UNSCALED)).inv_freq
    wavelength = 2 * math.pi / unscaled
    long, short = wavelength > ORIGINAL, wavelength < ORIGINAL / 4
    between = ~long & ~short
    assert long.any()
    assert short.any()
    assert between.any()
    torch.testing.assert_close(scaled[long], unscaled[long] / 8)
    torch.testing.assert_close(scaled[short], unscaled[short])
    assert (scaled[between] < unscaled[between]).all()
    assert (scaled[between] > unscaled[between] / 8).all()


@pytest.mark.parametrize("name", YARN_VARIANTS)
def test_yarn(variant: Variant, name: str) -> None:  # C02
    added, factor, same_angles = YARN_VARIANTS[name]
    parameters = YARN | added
    modern = variant("modern", {"rope_parameters": {"rope_theta": THETA, **parameters}})
    legacy_keys = {"type": parameters.pop("rope_type"), **parameters}
    legacy = variant("legacy", {"rope_theta": THETA, "rope_scaling": legacy_keys})
    plain = variant("plain", {"rope_parameters": {"rope_theta": THETA, **YARN}})

    rotary = rotary_of(modern)
    assert rotary.scale == pytest.approx(factor)
    assert torch.equal(rotary.inv_freq, rotary_of(plain).inv_freq) == same_angles
    prompt = prompt_of(400)
    ours = logprobs_of(modern, prompt)
    assert torch.equal(ours, logprobs_of(legacy, prompt))
    like_plain = same_angles and factor == PLAIN_FACTOR
    assert torch.equal(ours, logprobs_of(plain, prompt)) == like_plain


@pytest.mark.parametrize("parameters", [YARN, {"rope_type": "llama3", **LLAMA3}])
def test_the_factor_does_not_multiply_the_length(
    variant: Variant, parameters: dict[str, Any]
) -> None:  # C02
    with open_llm(variant("scaled", {"rope_parameters": parameters})) as llm:
        assert llm.engine.max_model_len == LENGTH


def test_old_linear_scaling(variant: Variant) -> None:  # C04
    prompt = prompt_of(200)
    halved = variant(
        "linear", {"rope_theta": THETA, "rope_scaling": {"type": "linear", "factor": 2}}
    )
    unscaled = variant("unscaled", UNSCALED)
    assert (
        logprobs_of(halved, prompt) - logprobs_of(unscaled, prompt)
    ).abs().max() > 100 * NEAR_TIE
    positions = torch.arange(200)
    for slow, fast in zip(
        rotary_of(halved).angles(positions * 2), rotary_of(unscaled).angles(positions), strict=True
    ):
        torch.testing.assert_close(slow, fast)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": [1.0] * 16,
            "long_factor": [4.0] * 16,
        },
        {"rope_type": "proportional", "factor": 2.0},
        {"rope_type": "surprise", "factor": 2.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_other_types_are_refused(
    variant: Variant, scaling: dict[str, Any], key: str
) -> None:  # C05
    name = scaling["rope_type"]
    scaling = {key if k == "rope_type" else k: v for k, v in scaling.items()}
    directory = variant("model", {"rope_theta": THETA, "rope_scaling": scaling})
    with pytest.raises(ConfigError, match=f"{name}.*default, linear, llama3, yarn"):
        open_llm(directory)


@pytest.mark.parametrize(
    "keys",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": THETA, "partial_rotary_factor": 0.5}},
    ],
)
def test_partial_rotation_is_refused(variant: Variant, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        open_llm(variant("partial", keys))


@pytest.mark.parametrize("missing", ["factor", "low_freq_factor"])
def test_a_missing_parameter_is_named(variant: Variant, missing: str) -> None:
    scaling = {"rope_type": "llama3", **LLAMA3}
    del scaling[missing]
    with pytest.raises(ConfigError, match=missing):
        open_llm(variant("model", {"rope_scaling": scaling}))


def test_theta_decides(variant: Variant) -> None:
    """Control: a wrong base shows, so the equalities above are not blind to the angles."""
    prompt = prompt_of(200)
    one, other = (
        logprobs_of(variant(str(theta), {"rope_theta": theta}), prompt) for theta in (1e4, 1e6)
    )
    assert (one - other).abs().max() > 100 * NEAR_TIE
