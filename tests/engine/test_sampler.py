"""Draws have the shares that are computed by hand, and no request sways another's."""

import math
from collections import Counter
from functools import reduce
from operator import add
from random import Random
from types import SimpleNamespace

import pytest
import torch
from rigged_models import NEVER, SHARES, fixed_distribution, write_model
from tiny_models import prompt_of

from nanovllm import LLM, SamplingParams
from nanovllm.device import create_device
from nanovllm.engine.sampler import Sampled, Sampler

NUM_DRAWS = 400
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
BORDER = 1e-5
"""fp32 logits of another batch differ by some 1e-6, so a draw this close to the border between two
tokens may fall to either."""


@pytest.fixture(scope="module")
def rigged(tmp_path_factory):
    """A model without tokenizer that gives tokens 0 to 3 the shares 0.4, 0.3, 0.2, 0.1 for ever."""
    path = write_model(tmp_path_factory.mktemp("rigged"), fixed_distribution(SHARES, 16))
    with LLM(path, device="cpu", dtype="float32", num_kvcache_blocks=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def random(tiny):
    """A model with random weights."""
    with LLM(tiny(), device="cpu", dtype="float32", num_kvcache_blocks=64) as llm:
        yield llm


def tokens_of(llm, prompts, params):
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def sample(logits, *params, seen=(), draws=()):
    """Sample rows of logits once each; `draws` replace the numbers that the seeds would give."""
    numbers = iter(draws)
    sequences = [
        SimpleNamespace(
            params=p,
            token_ids=list(seen),
            seen=None,
            random=SimpleNamespace(random=lambda: next(numbers)) if draws else Random(p.seed),
        )
        for p in params
    ]
    return Sampler(create_device("cpu")).sample(torch.as_tensor(logits), sequences)


# C28: what each setting leaves of 0.4, 0.3, 0.2, 0.1, by hand; each is divided by its sum.
SETTINGS = {
    "plain": ({}, (4, 3, 2, 1)),
    "cold": ({"temperature": 0.5}, (16, 9, 4, 1)),
    "hot": ({"temperature": 2.0}, (2, math.sqrt(3), math.sqrt(2), 1)),
    "almost greedy": ({"temperature": 1e-4}, (1,)),
    "top_k 1": ({"top_k": 1}, (1,)),
    "top_k 3": ({"top_k": 3}, (4, 3, 2)),
    "top_k 0 is all": ({"top_k": 0}, (4, 3, 2, 1)),
    "top_k beyond the vocabulary": ({"top_k": 1000}, (4, 3, 2, 1)),
    "top_p keeps the token that crosses": ({"top_p": 0.5}, (4, 3)),
    "top_p reached exactly": ({"top_p": 0.7}, (4, 3)),
    "top_p just beyond": ({"top_p": 0.71}, (4, 3, 2)),
    "tiny top_p keeps the best": ({"top_p": 1e-9}, (1,)),
    "min_p": ({"min_p": 0.6}, (4, 3)),
    "min_p 1": ({"min_p": 1.0}, (1,)),
    # Where the order of the filters shows; the other order's answer is in the comment.
    "top_k, then top_p": ({"top_k": 2, "top_p": 0.5}, (1,)),  # 4, 3
    "min_p, then top_p": ({"min_p": 0.45, "top_p": 0.75}, (4, 3)),  # 4, 3, 2
    "temperature, then min_p": (  # 4, 3 of the cold shares' roots
        {"temperature": 2.0, "min_p": 0.55},
        (2, math.sqrt(3), math.sqrt(2)),
    ),
    "temperature, then top_p": (  # two tokens
        {"temperature": 2.0, "top_p": 0.65},
        (2, math.sqrt(3), math.sqrt(2)),
    ),
    "all of them": ({"temperature": 0.5, "min_p": 0.1, "top_k": 3, "top_p": 0.8}, (16, 9)),
}


@pytest.fixture(scope="module")
def settings_tokens(rigged):
    """400 draws of each setting, all settings in one batch."""
    params = [
        SamplingParams(max_tokens=NUM_DRAWS, seed=i, **options)
        for i, (options, _) in enumerate(SETTINGS.values())
    ]
    return dict(zip(SETTINGS, tokens_of(rigged, [[5]] * len(params), params), strict=True))


def outside_5_sigma(token_ids, weights):
    """Return the tokens whose count is not within 5 sigma of `weights`' shares of the draws."""
    counts, total = Counter(token_ids), sum(weights)
    wrong = [token for token in counts if token >= len(weights)]
    for token, weight in enumerate(weights):
        share = weight / total
        sigma = math.sqrt(len(token_ids) * share * (1 - share))
        if abs(counts[token] - len(token_ids) * share) > 5 * sigma:
            wrong.append(token)
    return wrong


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies(settings_tokens, name):
    assert len(settings_tokens[name]) == NUM_DRAWS
    assert outside_5_sigma(settings_tokens[name], SETTINGS[name][1]) == []


@pytest.mark.parametrize(
    ("name", "weights"),
    [("plain", (16, 9, 4, 1)), ("top_p just beyond", (4, 3)), ("top_p reached exactly", (4, 3, 2))],
)
def test_wrong_shares_are_seen(settings_tokens, name, weights):
    """Control: other shares, a token too many and a token too few are all outside 5 sigma."""
    assert outside_5_sigma(settings_tokens[name], weights) != []


@pytest.mark.parametrize(
    ("draw", "token"),
    [(0.0, 0), (0.39, 0), (0.41, 1), (0.69, 1), (0.71, 2), (0.91, 3), (1 - 2**-53, 3)],
)
def test_draw_inverts_the_cumulative_distribution(draw, token):
    """The extreme draws fall to tokens with a share, not to the impossible ones around them."""
    logits = fixed_distribution(SHARES, 6)[:1].roll(1)  # the impossible come first and last
    (result,) = sample(logits, SamplingParams(), draws=[draw])
    assert result.token_id == token + 1


@pytest.mark.parametrize("num_tokens", range(2, 40))
def test_greatest_draw_of_any_total(num_tokens):
    """Whatever a sum rounds to, the greatest draw falls to the last token that is left."""
    logits = torch.randn(1, num_tokens, generator=torch.Generator().manual_seed(num_tokens))
    for top_k in range(1, num_tokens + 1):
        kept = logits[0].topk(top_k).indices
        (result,) = sample(logits, SamplingParams(top_k=top_k), draws=[1 - 2**-53])
        assert result.token_id == kept.max()


def test_share_is_reached_to_rounding():
    """With n tokens alike a top_p of k / n keeps k, though sums of 1 / n miss k / n."""
    assert reduce(add, [0.1] * 8) < 0.8, "control: such sums do fall short"
    for n in range(2, 30):
        for k in range(1, n):
            params = SamplingParams(top_p=k / n)
            (result,) = sample(torch.zeros(1, n), params, draws=[1 - 2**-53])
            assert result.token_id == k - 1


@pytest.mark.parametrize(
    ("logits", "seen", "penalty", "expected"),
    [
        # Positive logits are divided, negative multiplied, each once however often it was seen.
        ([2.0, 1.5, -1.0], [0, 0, 0], 2.0, 1),
        ([2.0, 1.5, -1.0], [0, 0, 0], 1.2, 0),
        ([-1.0, -1.5, -9.0], [0], 2.0, 1),
        ([-1.0, -1.5, -9.0], [0], 1.2, 0),
        ([2.0, 1.5, -1.0], [1], 0.5, 1),
        ([2.0, 1.5, -1.0], [], 2.0, 0),
    ],
)
def test_repetition_penalty(logits, seen, penalty, expected):
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    (result,) = sample([logits], params, seen=seen)
    assert result.token_id == expected


def test_repetition_penalty_counts_prompt_and_output(rigged):
    """log p of 0.4 and 0.3 cross at a penalty of 1.32: each token of the four is taken in turn."""
    penalised = SamplingParams(temperature=0.0, max_tokens=4, repetition_penalty=3.0)
    plain = SamplingParams(temperature=0.0, max_tokens=4)
    tokens = tokens_of(rigged, [[5], [0], [5]], [penalised, penalised, plain])
    # After 0 and 1 were seen their logits are 3 log 0.4 = -2.7 and 3 log 0.3 = -3.6, below
    # log 0.2 = -1.6 and log 0.1 = -2.3; in the end all four are penalised and 0 is best again.
    assert tokens == [[0, 1, 2, 3], [1, 2, 3, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_harm_no_neighbour(bad):
    logits = fixed_distribution(SHARES, 6)[:4].clone()
    logits[1:3, 4] = bad
    greedy = SamplingParams(temperature=0.0, logprobs=1)
    drawing = SamplingParams(top_p=0.9, logprobs=1, seed=3)
    results = sample(logits, greedy, greedy, drawing, drawing)
    assert results[1] == results[2] == Sampled(None, None)
    assert [results[0]] == sample(logits[:1], greedy)
    assert [results[3]] == sample(logits[3:], drawing)


def test_barred_token():
    """A logit of -inf bars its token and nothing else."""
    logits = fixed_distribution(SHARES, 6)[:2].clone()
    logits[:, 0] = -math.inf
    greedy, drawing = SamplingParams(temperature=0.0), SamplingParams(logprobs=1)
    results = sample(logits, greedy, drawing, draws=[0.49])
    assert [result.token_id for result in results] == [1, 1]  # 0.3 of 0.6 is below 0.5
    assert results[1].logprobs == {1: pytest.approx(math.log(0.5))}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision(dtype):
    """Are sampled as the fp32 numbers that they are."""
    logits = 4 * torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    params = (
        SamplingParams(seed=0, logprobs=3),
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=3),
    )
    seen = logits.argmax(-1).tolist()
    assert sample(logits, *params, seen=seen) == sample(logits.float(), *params, seen=seen)


def test_unfiltered_row_beside_a_filtered_one():
    """A neighbour's filter takes no part of a long tail away from a request that has none."""
    shares = [1 - 9e-7, *[1e-7] * 9]
    logits = fixed_distribution(shares, 10)[:2].clone()
    plain, filtered = SamplingParams(), SamplingParams(top_p=0.5)
    for draw in (0.5, 1 - 3e-7, 1 - 1e-8):
        (alone,) = sample(logits[:1], plain, draws=[draw])
        assert sample(logits, plain, filtered, draws=[draw, draw])[0] == alone
    assert alone.token_id == 9


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}])
def test_seed_holds_whatever_runs_beside(rigged, options):
    """C28: 40 seeds alone, in a batch, reversed, and among requests without a seed."""
    params = [SamplingParams(max_tokens=10, seed=seed, **options) for seed in range(40)]
    alone = [tokens_of(rigged, [[5]], p)[0] for p in params]
    assert len(set(map(tuple, alone))) > 30, "control: seeds differ"
    assert tokens_of(rigged, [[5]] * 40, params) == alone
    assert tokens_of(rigged, [[5]] * 40, params[::-1]) == alone[::-1]
    unseeded = SamplingParams(max_tokens=7, temperature=1.5, top_k=3)
    mixed = [p for seeded in params for p in (unseeded, seeded)]
    assert tokens_of(rigged, [[5]] * 80, mixed)[1::2] == alone


def test_unseeded_requests_differ(rigged):
    tokens = tokens_of(rigged, [[5]] * 20, SamplingParams(max_tokens=20))
    assert len(set(map(tuple, tokens))) == 20


def first_difference_is_at_a_border(ours, alone, params):
    """Whether two answers agree up to a draw on the border between two tokens."""
    for place, (token, logprobs) in enumerate(zip(ours, alone.logprobs, strict=True)):
        if token == alone.token_ids[place]:
            continue
        generator = Random(params.seed)
        draw = [generator.random() for _ in range(place + 1)][-1]
        raw = torch.tensor([logprobs[i] for i in range(len(logprobs))], dtype=torch.float64)
        borders = (raw / params.temperature).softmax(0).cumsum(0)
        return bool((borders - draw).abs().min() < BORDER)
    return True


@pytest.fixture(scope="module")
def seeded_runs(random):
    """C29: eight prompts with a seed each, and what each gives when it runs alone."""
    prompts = [prompt_of(length, seed=9) for length in (50, 75, 100, 130, 190, 256, 333, 400)]
    params = [
        SamplingParams(temperature=0.8, max_tokens=60, seed=100 + i, logprobs=320)
        for i in range(len(prompts))
    ]
    alone = [
        random.generate([p], q, use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)
    ]
    return prompts, params, alone


@pytest.mark.parametrize(
    "order", [range(8), (5, 2, 7, 0, 3, 6, 1, 4)], ids=["as given", "shuffled"]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_seqs": 2}, {"kvcache_block_size": 16}, {"enable_prefix_caching": False}],
    ids=["all at once", "two at a time", "prefix hits", "no cache"],
)
def test_seeded_tokens_do_not_depend_on_the_batch(tiny, seeded_runs, options, order):
    prompts, params, alone = seeded_runs
    with LLM(tiny(), device="cpu", dtype="float32", num_kvcache_blocks=256, **options) as llm:
        if "kvcache_block_size" in options:
            llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        outputs = llm.generate(
            [prompts[i] for i in order], [params[i] for i in order], use_tqdm=False
        )
    for i, output in zip(order, outputs, strict=True):
        assert len(output.token_ids) == 60
        assert (output.num_cached_tokens > 0) == ("kvcache_block_size" in options)
        assert first_difference_is_at_a_border(output.token_ids, alone[i], params[i])


def test_other_seed_is_not_at_a_border(random, seeded_runs):
    """Control: another seed's tokens are told apart from rounding."""
    prompts, params, alone = seeded_runs
    other = random.generate([prompts[0]], params[1], use_tqdm=False)[0]
    assert not first_difference_is_at_a_border(other.token_ids, alone[0], params[0])


@pytest.mark.parametrize(
    ("options", "draws_others"),
    [
        ({"temperature": 0.5}, True),
        ({"top_p": 0.5}, False),
        ({"temperature": 0.0}, False),
        ({"repetition_penalty": 1.5}, True),
    ],
    ids=str,
)
def test_logprobs_are_raw(rigged, options, draws_others):
    """C31: log 0.4 and log 0.3 under any setting, and the chosen token's own if it is neither."""
    params = SamplingParams(max_tokens=50, logprobs=2, seed=0, **options)
    (output,) = rigged.generate([[5]], params, use_tqdm=False)
    assert len(output.logprobs) == len(output.token_ids) == 50
    for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
        assert set(logprobs) == {0, 1, token}
        assert list(logprobs.values()) == sorted(logprobs.values(), reverse=True)
        for i, value in logprobs.items():
            assert value == pytest.approx(math.log(SHARES[i]), abs=1e-5)
    assert bool(set(output.token_ids) - {0, 1}) == draws_others


@pytest.mark.parametrize(("number", "expected"), [(0, 1), (1, 1), (3, 3), (1000, 16)])
def test_number_of_logprobs(rigged, number, expected):
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=number)
    (output,) = rigged.generate([[5]], params, use_tqdm=False)
    assert [len(logprobs) for logprobs in output.logprobs] == [expected] * 2
    (without,) = rigged.generate([[5]], GREEDY, use_tqdm=False)
    assert without.logprobs is None


@pytest.mark.parametrize("model", ["rigged", "random"])
def test_mixed_batch_equals_single_runs(request, model):
    """C32: greedy ones beside sampled ones, with and without filters and penalty."""
    llm = request.getfixturevalue(model)
    params = [
        GREEDY,
        SamplingParams(temperature=0.7, top_k=1, max_tokens=20, seed=1),
        SamplingParams(temperature=2.0, max_tokens=20, seed=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=20),
        SamplingParams(temperature=1e-4, top_p=0.1, min_p=0.5, max_tokens=20, seed=3),
    ]
    alone = [tokens_of(llm, [[5, 6, 7]], p)[0] for p in params]
    assert tokens_of(llm, [[5, 6, 7]] * len(params), params) == alone
    assert alone[0] == alone[1] == alone[4], "all three take the best token"
    assert alone[0] != alone[2], "control: a high temperature shows"
    assert alone[0] != alone[3], "control: the penalty shows"


def test_impossible_tokens_are_never_drawn():
    """A temperature far above any in use still leaves a masked token without a share."""
    logits = fixed_distribution(SHARES, 16)[:1]
    assert logits.min() == NEVER
    draws = [i / 200 for i in range(200)]
    tokens = {
        sample(logits, SamplingParams(temperature=10.0), draws=[draw])[0].token_id for draw in draws
    }
    assert tokens == {0, 1, 2, 3}


def test_penalty_follows_the_answer_token_by_token():
    """What the sampler keeps of a sequence gives what a fresh look at all its tokens gives."""
    params = SamplingParams(temperature=0, repetition_penalty=1.5)
    sampler = Sampler(create_device("cpu"))
    kept = SimpleNamespace(params=params, token_ids=[3, 3, 7], seen=None, random=Random(0))
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        logits = torch.randn(1, 12, generator=generator)
        (ours,) = sampler.sample(logits, [kept])
        (fresh,) = sample(logits, params, seen=kept.token_ids)
        assert ours.token_id == fresh.token_id
        kept.token_ids.append(ours.token_id)
    assert len(set(kept.token_ids)) > 6, "the penalty has tokens to act on"


@pytest.mark.parametrize("counts", [(0, 2, 5), (50, 1, 3)])
def test_logprobs_of_a_batch_are_those_of_each_alone(counts):
    """Requests that want different numbers of them share one transfer."""
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=0, logprobs=n) for n in counts]
    together = sample(logits, *params[:2], SamplingParams(temperature=0), params[2])
    assert together[2].logprobs is None
    for row, p in zip((0, 1, 3), params, strict=True):
        truth = logits[row].log_softmax(-1)
        best = truth.topk(min(p.logprobs, 20)).indices.tolist()
        expected = {i: truth[i].item() for i in best} | {together[row].token_id: truth.max().item()}
        assert list(together[row].logprobs) == list(expected)
        assert together[row].logprobs == pytest.approx(expected, abs=1e-6)
