"""What a policy keeps of the true attention: figures by hand, and by float64 from the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from rigged_models import byte_level_tokenizer
from tiny_models import (
    VOCAB_SIZE,
    assert_same_answer,
    generate,
    make_model,
    open_llm,
    prompt_of,
)

from nanovllm import LLM
from nanovllm.config import Config
from nanovllm.eval import ruler
from nanovllm.eval.recall import (
    Figures,
    Recall,
    RecallProbe,
    RecallSummary,
    TileRecall,
    draw_query_tiles,
    measure_tile,
)
from nanovllm.eval.recall import __main__ as recall_main
from nanovllm.eval.recall.report import as_json_lines, as_text
from nanovllm.kvcache.sparse.tile_policy import TilePolicy
from nanovllm.kvcache.sparse.xattn_bsa import XAttentionBSAPolicy

Tiny = Callable[..., Path]

TILE = 128
ROUNDING = 1e-5
"""Shares and squared norms are sums of at most a thousand fp32 numbers: 2e-7 was measured. A tile
too many or too few moves them by 1e-2."""


@pytest.fixture(autouse=True)
def checked_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", "1")


# One query tile


class Truth:
    """Attention in float64, of the last rows of a sequence; the heads' axis comes first."""

    def __init__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        group = query.shape[1] // keys.shape[1]
        q, k, v = (x.double().transpose(0, 1) for x in (query, keys, values))
        self.values = v.repeat_interleave(group, 0)
        logits = q @ k.repeat_interleave(group, 0).mT * q.shape[-1] ** -0.5
        self.key = torch.arange(k.shape[1])
        position = self.key[-q.shape[1] :, None]
        self.logits = logits.masked_fill(self.key > position, -math.inf)
        self.weights = self.logits.softmax(-1)
        self.output = self.weights @ self.values

    def visible(self, tiles: torch.Tensor) -> torch.Tensor:
        return tiles[:, self.key // TILE][:, None]

    def kept(self, tiles: torch.Tensor) -> torch.Tensor:
        return self.weights.where(self.visible(tiles), 0).sum(-1)

    def error(self, tiles: torch.Tensor) -> torch.Tensor:
        """Return the output's error, by row."""
        weights = self.logits.masked_fill(~self.visible(tiles), -math.inf).softmax(-1)
        return weights.nan_to_num(0) @ self.values - self.output

    def oracle(self, tiles: torch.Tensor) -> torch.Tensor:
        """Return each head's mean share of the best of all choices of as many tiles."""
        singles = torch.eye(tiles.shape[1], dtype=torch.bool)
        # [num_heads, num_k_tiles]
        means = torch.stack([self.kept(one.expand_as(tiles)).mean(1) for one in singles], 1)
        counts = tiles.sum(-1).tolist()
        best = [
            max(map(sum, combinations(of_head, count)))
            for of_head, count in zip(means.tolist(), counts, strict=True)
        ]
        return torch.tensor(best, dtype=torch.float64)


def squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum((1, 2))


def close(ours: torch.Tensor, truth: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), truth, rtol=ROUNDING, atol=ROUNDING)


def draw_tile(
    heads: tuple[int, int], num_rows: int, k_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(k_len)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    # Sharp enough for tiles to differ, and values that do not average out.
    query = 3 * draw(num_rows, heads[0], 32)
    return query, draw(k_len, heads[1], 32), draw(k_len, heads[1], 32) + draw(1, heads[1], 32)


@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize(("num_rows", "k_len"), [(128, 128), (128, 768), (37, 677), (1, 513)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_is_measured_as_by_definition(
    heads: tuple[int, int], num_rows: int, k_len: int, dtype: torch.dtype
) -> None:
    query, keys, values = draw_tile(heads, num_rows, k_len, dtype)
    truth = Truth(query, keys, values)
    generator = torch.Generator().manual_seed(0)
    shape = (heads[0], -(-k_len // TILE))
    choices = [torch.rand(shape, generator=generator) < share for share in (0.3, 0.7)]
    found = measure_tile(query, keys, values, 32**-0.5, choices)
    for tiles, ours in zip(choices, found, strict=True):
        close(ours.kept, truth.kept(tiles))
        close(ours.oracle.mean(1), truth.oracle(tiles))
        close(ours.error, squares(truth.error(tiles)))
        close(ours.output, squares(truth.output))
        assert (ours.kept.mean(1) <= ours.oracle.mean(1) + ROUNDING).all()


def test_all_tiles_keep_everything_and_none_keeps_nothing() -> None:
    query, keys, values = draw_tile((4, 2), 60, 700, torch.float32)
    everything = torch.ones(4, 6, dtype=torch.bool)
    dense, empty = measure_tile(query, keys, values, 32**-0.5, [everything, ~everything])
    close(dense.kept, torch.ones(4, 60, dtype=torch.float64))
    close(dense.oracle, torch.ones(4, 60, dtype=torch.float64))
    assert (dense.error / dense.output).max() < ROUNDING**2
    assert empty.kept.eq(0).all()
    assert empty.oracle.eq(0).all()
    assert torch.equal(empty.error, empty.output)


# Figures


def recall_of(kept: Sequence[Sequence[float]], error: Sequence[float]) -> TileRecall:
    """Return a query tile of two rows and two heads."""
    shares = torch.tensor(kept)
    return TileRecall(shares, (shares + 1) / 2, torch.tensor(error), torch.tensor([4.0, 16.0]))


@pytest.fixture
def summary() -> RecallSummary:
    recall = Recall()
    tiles = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 0, 0], [0, 1, 0], [0, 0, 1]]])
    for layer in (3, 1):
        recall.density.add(layer, tiles.bool(), 6)
    recall.add(3, recall_of([[0.25, 0.75], [1.0, 1.0]], [1.0, 0.0]))
    recall.add(1, recall_of([[0.5, 0.5], [0.75, 0.25]], [1.0, 9.0]))
    recall.add(3, recall_of([[1.0, 1.0], [1.0, 0.0]], [1.0, 16.0]))
    recall.add(1, recall_of([[0.5, 0.5], [0.5, 0.5]], [0.0, 9.0]))
    return recall.summary()


def test_figures_by_hand(summary: RecallSummary) -> None:
    assert list(summary.by_layer) == [1, 3]
    assert list(summary.by_head) == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert summary.by_head[3, 0] == Figures(
        tile_density=1.0,
        kept=0.75,
        oracle_kept=0.875,
        lowest_kept=0.25,
        low_rows=0.5,
        output_error=0.5,
    )
    assert summary.by_head[3, 1] == Figures(
        tile_density=0.5,
        kept=0.75,
        oracle_kept=0.875,
        lowest_kept=0.0,
        low_rows=0.25,
        output_error=pytest.approx(math.sqrt(16 / 32)),
    )
    assert summary.by_layer[1] == Figures(
        tile_density=0.75,
        kept=0.5,
        oracle_kept=0.75,
        lowest_kept=0.25,
        low_rows=1.0,
        output_error=pytest.approx(math.sqrt(19 / 40)),
    )
    assert summary.total == Figures(
        tile_density=0.75,
        kept=0.625,
        oracle_kept=0.8125,
        lowest_kept=0.0,
        low_rows=11 / 16,
        output_error=pytest.approx(math.sqrt(37 / 80)),
    )


def test_the_lowest_part_is_one_percent_of_the_rows() -> None:
    recall = TileRecall(torch.arange(400.0)[None] / 400, *torch.ones(3, 1, 1).unbind())
    assert Figures.of(recall, 1.0).lowest_kept == pytest.approx((0 + 1 + 2 + 3) / 4 / 400)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no query tile was measured"):
        Recall().summary()


def test_tables_and_lines_of_json(summary: RecallSummary) -> None:
    summaries = {"A": summary, "B": summary}
    total, layers, worst, _ = as_text(summaries).split("\n\n")
    assert [line.split() for line in total.splitlines()[1:]] == [
        ["1", "A", "0.750", "0.625", "0.812", "0.00", "68.8%", "0.680"],
        ["2", "B", "0.750", "0.625", "0.812", "0.00", "68.8%", "0.680"],
    ]
    assert [line.split() for line in layers.splitlines()] == [
        ["layer", "kept", "1", "error", "1", "kept", "2", "error", "2"],
        ["1", *["0.500", "0.689"] * 2],
        ["3", *["0.750", "0.671"] * 2],
    ]
    title, _, *heads = worst.splitlines()
    assert title == "worst heads of A"
    assert [line.split()[:2] for line in heads] == [["1", "0"], ["1", "1"], ["3", "0"], ["3", "1"]]
    rows = [json.loads(line) for line in as_json_lines(summaries)]
    assert [(row["policy"], row["layer"], row["head"]) for row in rows] == [
        (policy, layer, head) for policy in "AB" for layer in (1, 3) for head in (0, 1)
    ]
    assert rows[2] == {
        "policy": "A",
        "layer": 3,
        "head": 0,
        "tile_density": 1.0,
        "kept": 0.75,
        "oracle_kept": 0.875,
        "lowest_kept": 0.25,
        "low_rows": 0.5,
        "output_error": 0.5,
    }


def test_worst_heads_come_first_and_are_few() -> None:
    def figures(kept: float) -> Figures:
        return Figures(
            tile_density=1, kept=kept, oracle_kept=1, lowest_kept=0, low_rows=0, output_error=0
        )

    by_head = {(0, head): figures((head * 7 + 4) % 10 / 10) for head in range(10)}
    summary = RecallSummary(total=figures(1), by_layer={0: figures(1)}, by_head=by_head)
    worst = as_text({"A": summary}).split("\n\n")[-1].splitlines()[2:]
    assert [line.split()[1] for line in worst] == ["8", "1", "4", "7", "0"]


# Which query tiles are measured


@pytest.mark.parametrize("num_tokens", [1, 128, 129, 4000, 4096])
def test_query_tiles_are_drawn_after_the_first_quarter(num_tokens: int) -> None:
    num_tiles = -(-num_tokens // TILE)
    everything = draw_query_tiles(num_tokens, 1000, Random(0))
    assert everything == list(range(num_tiles // 4, num_tiles))
    drawn = draw_query_tiles(num_tokens, 5, Random(0))
    assert len(drawn) == len(set(drawn)) == min(5, len(everything))
    assert drawn == sorted(drawn)
    assert set(drawn) <= set(everything)
    assert drawn == draw_query_tiles(num_tokens, 5, Random(0))


# In the engine

LENGTH = 1100
NUM_TILES = 9
QUERY_TILES = (2, 3, 6, 8)
OFFLOADED = {"enable_offload": True, "kvcache_block_size": 128}
MODES: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks": {"kvcache_block_size": 256, "max_num_batched_tokens": 300},
    "layer-major": OFFLOADED | {"prefill_order": "layer", "max_num_batched_tokens": 400},
    "chunk-major": OFFLOADED
    | {"prefill_order": "chunk", "max_num_batched_tokens": 400, "num_gpu_blocks": 2},
}
every_mode = pytest.mark.parametrize("mode", MODES)


class Table(TilePolicy):
    """Keeps tiles that were drawn beforehand, and remembers what it saw of the whole prompt.

    Args:
        share: of the tiles that are kept, beside the diagonal.
    """

    log_name = "table"

    def __init__(self, share: float) -> None:
        super().__init__()
        draws = torch.rand(2, 4, NUM_TILES, NUM_TILES, generator=torch.Generator().manual_seed(5))
        self.tiles = ((draws < share) | torch.eye(NUM_TILES, dtype=torch.bool)).tril()
        self.queries: dict[int, list[torch.Tensor]] = {}
        self.context: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def select_tiles(self, source: Any, ctx: Any) -> torch.Tensor:
        keys, values = source.load(source.available_blocks)
        if not ctx.num_history_tokens:
            self.queries[ctx.layer_id] = []
        self.queries[ctx.layer_id].append(ctx.query.clone())
        self.context[ctx.layer_id] = (keys.clone(), values.clone())
        first, end = ctx.num_history_tokens // TILE, -(-len(keys) // TILE)
        return self.tiles[ctx.layer_id, :, first:end, :end]

    def expected(self, layer: int) -> list[dict[str, float]]:
        """Return each head's figures in float64, of what was seen last."""
        query, (keys, values) = torch.cat(self.queries[layer]), self.context[layer]
        kept, oracle, error, output = [], [], [], []
        for q_tile in QUERY_TILES:
            end = min(LENGTH, (q_tile + 1) * TILE)
            truth = Truth(query[q_tile * TILE : end], keys[:end], values[:end])
            tiles = self.tiles[layer, :, q_tile, : q_tile + 1]
            kept.append(truth.kept(tiles))
            oracle.append(truth.oracle(tiles) * kept[-1].shape[1])
            error.append(squares(truth.error(tiles)))
            output.append(squares(truth.output))
        rows, num_causal = torch.cat(kept, 1).sort().values, NUM_TILES * (NUM_TILES + 1) / 2
        num_rows = rows.shape[1]
        by_head = {
            "tile_density": self.tiles[layer].sum((1, 2)) / num_causal,
            "kept": rows.mean(1),
            "oracle_kept": sum(oracle) / num_rows,
            "lowest_kept": rows[:, : num_rows // 100].mean(1),
            "low_rows": (rows < 0.8).double().mean(1),
            "output_error": (sum(error) / sum(output)).sqrt(),
        }
        return [{name: float(x[head]) for name, x in by_head.items()} for head in range(4)]


def summaries_of(
    directory: Path,
    policies: dict[str, TilePolicy],
    mode: str = "one chunk",
    query_tiles: Sequence[int] = QUERY_TILES,
    layers: Sequence[int] | None = None,
) -> dict[str, RecallSummary]:
    probe = RecallProbe(policies, layers)
    with open_llm(directory, sparse_policy=probe, **MODES[mode]) as llm:
        probe.query_tiles = query_tiles
        generate(llm, [prompt_of(LENGTH)], 2)
    return {name: recall.summary() for name, recall in probe.recalls.items()}


@every_mode
def test_figures_are_those_of_float64_wherever_the_cache_lies(tiny: Tiny, mode: str) -> None:
    policies = {"few": Table(0.3), "many": Table(0.7)}
    summaries = summaries_of(tiny(), policies, mode)
    for name, table in policies.items():
        by_head = summaries[name].by_head
        assert list(by_head) == [(layer, head) for layer in (0, 1) for head in range(4)]
        expected = [table.expected(layer) for layer in (0, 1)]
        for (layer, head), figures in by_head.items():
            for field, value in expected[layer][head].items():
                # One row may cross a border by rounding.
                rounding = 1 / 400 if field == "low_rows" else ROUNDING
                assert getattr(figures, field) == pytest.approx(value, abs=rounding), field
    few, many = summaries["few"].total, summaries["many"].total
    assert few.tile_density < many.tile_density
    assert few.kept < many.kept
    assert few.output_error > many.output_error > 0.01


@every_mode
def test_all_tiles_keep_all(tiny: Tiny, mode: str) -> None:
    policies: dict[str, TilePolicy] = {
        "XATTN_BSA": XAttentionBSAPolicy(1.0),
        "dense layers": XAttentionBSAPolicy(0.5, dense_layers=2),
    }
    for summary in summaries_of(tiny(), policies, mode).values():
        for figures in [summary.total, *summary.by_head.values()]:
            assert figures.tile_density == 1
            assert figures.kept == pytest.approx(1, abs=ROUNDING)
            assert figures.lowest_kept == pytest.approx(1, abs=ROUNDING)
            assert figures.oracle_kept == pytest.approx(1, abs=ROUNDING)
            assert figures.low_rows == 0
            assert figures.output_error < ROUNDING


@every_mode
def test_query_tiles_that_a_policy_leaves_dense_keep_all(tiny: Tiny, mode: str) -> None:
    """In chunks it returns no tiles for the first of them, and some for the next."""
    policies: dict[str, TilePolicy] = {
        "late": XAttentionBSAPolicy(0.3, estimator="group", min_len=512)
    }
    early = summaries_of(tiny(), policies, mode, query_tiles=[2, 3])["late"].total
    assert early.kept == pytest.approx(1, abs=ROUNDING)
    assert early.output_error < ROUNDING
    late = summaries_of(tiny(), policies, mode, query_tiles=[4])["late"].total
    assert late.kept < 0.99
    assert late.output_error > 0.01
    assert early.tile_density == late.tile_density < 1


def test_only_the_layers_asked_for_are_measured(tiny: Tiny) -> None:
    table = Table(0.5)
    some = summaries_of(tiny(), {"table": table}, layers=[1])["table"]
    assert list(table.queries) == [1]
    everything = summaries_of(tiny(), {"table": Table(0.5)})["table"]
    assert some.by_layer == {1: everything.by_layer[1]}
    assert some.total == some.by_layer[1]


@every_mode
def test_the_answer_is_that_of_dense_attention(tiny: Tiny, mode: str) -> None:
    prompts = [prompt_of(n) for n in (1, 130, LENGTH)]
    outputs = []
    for policy in ("FULL", RecallProbe({"table": Table(0.1)})):
        with open_llm(tiny(), sparse_policy=policy, **MODES[mode]) as llm:
            outputs.append(generate(llm, prompts, 4, logprobs=VOCAB_SIZE))
    for dense, ours in zip(*outputs, strict=True):
        assert_same_answer(ours, dense)


def test_prompts_add_up_until_the_figures_are_reset(tiny: Tiny) -> None:
    probe = RecallProbe({"table": Table(0.5)})
    with open_llm(tiny(), sparse_policy=probe, enable_prefix_caching=False) as llm:
        with pytest.raises(ValueError, match="no query tile"):
            probe.recalls["table"].summary()  # loading leaves nothing behind
        probe.query_tiles = [2]
        totals = []
        for reset, lengths in ((True, [1000]), (True, [500]), (True, [1000, 500])):
            if reset:
                llm.reset_stats()
            for length in lengths:
                generate(llm, [prompt_of(length)], 1)
            totals.append(probe.recalls["table"].summary().total)
    one, other, both = totals
    assert one.kept != pytest.approx(other.kept, abs=1e-3)
    assert both.kept == pytest.approx((one.kept + other.kept) / 2, abs=ROUNDING)


# The command line


def run(*argv: object) -> None:
    recall_main.main(list(map(str, argv)))


def refused(*argv: object) -> bool:
    """Return whether a call ends as a wrong one does."""
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    return stop.value.code == 2


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    path = make_model(tmp_path_factory.mktemp("model"))
    byte_level_tokenizer(adds_bos=True).save_pretrained(path)
    return path


SPARSE = "XATTN_BSA:estimator=group,min_len=0,threshold=0.5"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--compare", SPARSE, "FULL"], "FULL: FullAttentionPolicy chooses no tiles"),
        (["--compare", SPARSE, SPARSE], f"{SPARSE} is there twice"),
        (["--compare", "XATTN_BSA:tau=1"], "unknown option 'tau'"),
        (["--compare", SPARSE, "--layers", 0, 2], "--layers 2: the model has layers 0 to 1"),
        (["--compare", SPARSE, "--tiles", 0], "--tiles 0: not an integer >= 1"),
        (["--compare", SPARSE, "--num-samples", 0], "--num-samples 0: not an integer >= 1"),
        (["--compare", SPARSE, "--task", "niah"], "unknown task 'niah'"),
        (["--compare", SPARSE, "--length", 50], "50"),
        ([], "--compare"),
    ],
)
def test_wrong_calls_say_what_is_wrong(
    texts: Path, capsys: pytest.CaptureFixture[str], argv: Sequence[object], reason: str
) -> None:
    assert refused("--model", texts, "--device", "cpu", *argv)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("where", [[], ["--enable-offload"]], ids=["resident", "offload"])
def test_two_prompts_by_two_policies(
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: list[str],
) -> None:
    used: list[Config] = []

    class Watched(LLM):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            used.append(self.engine.config)

    monkeypatch.setattr(recall_main, "LLM", Watched)
    path = tmp_path / "new" / "recall.jsonl"
    options = ["--length", 1800, "--num-samples", 2, "--tiles", 3, "--layers", 1, *where]
    options += ["--device", "cpu", "--json-output", path]
    policies = [SPARSE, "STREAMING"]
    run("--model", texts, *options, "--compare", *policies)
    (config,) = used
    assert config.enable_offload == bool(where)
    assert not config.enable_prefix_caching
    out = capsys.readouterr().out
    assert all(f"{number}  {name}" in out for number, name in enumerate(policies, 1))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(row["policy"], row["layer"], row["head"]) for row in rows] == [
        (name, 1, head) for name in policies for head in range(4)
    ]

    probe, random = (
        RecallProbe({SPARSE: XAttentionBSAPolicy(0.5, estimator="group")}, [1]),
        Random(0),
    )
    with LLM(texts, sparse_policy=probe, enable_prefix_caching=False, device="cpu") as llm:
        for sample in ruler.generate("vt", llm.tokenizer, 1800, 2):
            probe.query_tiles = draw_query_tiles(len(sample.token_ids), 3, random)
            generate(llm, [sample.token_ids], 1)
    for row, figures in zip(
        rows[:4], probe.recalls[SPARSE].summary().by_head.values(), strict=True
    ):
        ours = {name: row[name] for name in asdict(figures)}
        assert ours == pytest.approx(asdict(figures), abs=ROUNDING)
        assert 0.1 < ours["tile_density"] < 0.9
        assert 0.3 < ours["kept"] <= ours["oracle_kept"] < 1
    # The window is longer than the prompt.
    assert all(row["tile_density"] == 1 and row["kept"] == pytest.approx(1) for row in rows[4:])


def test_a_prompt_that_the_model_refuses_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_model(tmp_path, vocab_size=100)
    byte_level_tokenizer().save_pretrained(path)
    assert refused("--model", path, "--device", "cpu", "--compare", SPARSE, "--length", 1500)
    assert "the vocabulary" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_model_keeps_most_of_its_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recall.jsonl"
    loose, tight = "XATTN_BSA:min_len=0,threshold=0.8", "XATTN_BSA:min_len=0,threshold=0.95"
    options = ["--length", 1536, "--tiles", 4, "--layers", 0, 29, "--json-output", path]
    run(*options, "--compare", loose, tight)
    out = capsys.readouterr().out
    assert f"1  {loose}" in out
    assert f"2  {tight}" in out
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 2 * 2 * 9
    for few, many in zip(rows[:18], rows[18:], strict=True):
        assert few["kept"] <= many["kept"] <= many["oracle_kept"] + ROUNDING
    means = [sum(row["kept"] for row in part) / 18 for part in (rows[:18], rows[18:])]
    assert 0.7 < means[0] < means[1] < 1
