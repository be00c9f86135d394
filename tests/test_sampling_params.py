"""Sampling parameters are checked when they are made, and refused by name."""

import dataclasses
import math

import numpy as np
import pytest

from nanovllm import ConfigError, SamplingParams

INVALID = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", None),
    ("temperature", True),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", None),
    ("ignore_eos", 1),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 2.0),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("stop", ""),
    ("stop", ["end", ""]),
    ("stop", [7]),
    ("stop", 7),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", ["7"]),
    ("stop_token_ids", 7),
    ("seed", 1.0),
    ("seed", "1"),
    ("logprobs", -1),
    ("logprobs", True),
]


@pytest.mark.parametrize(("name", "value"), INVALID, ids=repr)
def test_invalid_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^SamplingParams: {name}="):
        SamplingParams(**{name: value})


def test_every_parameter_has_an_invalid_value_above():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {name for name, _ in INVALID} == fields


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", 0, 0),
        ("temperature", 1e-9, 1e-9),
        ("top_p", 1, 1),
        ("top_p", 1e-9, 1e-9),
        ("top_k", 0, 0),
        ("top_k", 10**9, 10**9),
        ("min_p", 0, 0),
        ("min_p", 1, 1),
        ("stop", "end", ("end",)),
        ("stop", ["end", "\n"], ("end", "\n")),
        ("stop", None, ()),
        ("stop_token_ids", [1, 0], (1, 0)),
        ("stop_token_ids", np.array([1, 0]), (1, 0)),
        ("stop_token_ids", None, ()),
        ("seed", -1, -1),
        ("logprobs", 0, 0),
    ],
    ids=repr,
)
def test_valid_value_in_its_one_form(name, value, expected):
    assert getattr(SamplingParams(**{name: value}), name) == expected


def test_order_of_the_first_fields_is_nano_vllms():
    assert SamplingParams(0.6, 256, True) == SamplingParams(
        temperature=0.6, max_tokens=256, ignore_eos=True
    )


def test_frozen():
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0
    assert dataclasses.replace(params, stop=["a"]).stop == ("a",)
