"""The picture of the tiles that XATTN_BSA keeps: what it shows, and that it is drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigged_models import byte_level_tokenizer
from tiny_models import VOCAB_SIZE, copy_model, open_llm, prompt_of

from nanovllm.errors import ConfigError
from nanovllm.eval.needle import build_task
from nanovllm.tools import selection_plot
from nanovllm.tools.selection_plot import Selection, draw
from nanovllm.tools.show_selection import TileRecorder, find_needle, main, record

Tiny = Callable[..., Path]

LENGTH, NUM_TILES = 1100, 9
OFFLOADED = {"enable_offload": True, "kvcache_block_size": 128}
MODES: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks": {"max_num_batched_tokens": 300},
    "layer-major": OFFLOADED | {"prefill_order": "layer", "max_num_batched_tokens": 400},
    "chunk-major": OFFLOADED | {"prefill_order": "chunk", "max_num_batched_tokens": 400},
}


def selection_of(directory: Path, mode: str = "one chunk", **options: Any) -> Selection:
    recorder = TileRecorder(0.5, estimator="group", **options)
    with open_llm(directory, sparse_policy=recorder, **MODES[mode]) as llm:
        record(llm, recorder, prompt_of(700, 1), [0, 1], [0])  # leaves nothing behind
        return record(llm, recorder, prompt_of(LENGTH), [1, 0], [3, 0])


# What is recorded.


@pytest.mark.parametrize("mode", MODES)
def test_tiles_are_those_that_were_computed(tiny: Tiny, mode: str) -> None:
    directory = tiny()
    selection = selection_of(directory, mode)
    assert list(selection.tiles) == [(1, 3), (1, 0), (0, 3), (0, 0)]
    assert [len(heads) for heads in selection.density_by_head] == [4, 4]
    whole = selection_of(directory)
    for (layer, head), tiles in selection.tiles.items():
        assert tiles.shape == (NUM_TILES, NUM_TILES)
        assert tiles[:, 0].all()
        assert tiles.diagonal().all()
        assert not tiles.triu(1).any()
        causal = NUM_TILES * (NUM_TILES + 1) / 2
        density = selection.density_by_head[layer][head]
        assert density == pytest.approx(int(tiles.sum()) / causal)
        assert density < 1
        assert torch.equal(tiles, whole.tiles[layer, head])


@pytest.mark.parametrize("mode", MODES)
def test_dense_queries_and_layers_show_as_dense(tiny: Tiny, mode: str) -> None:
    causal = torch.ones(NUM_TILES, NUM_TILES, dtype=torch.bool).tril()
    partly = selection_of(tiny(), mode, min_len=500, dense_layers=1)
    assert torch.equal(partly.tiles[0, 3], causal)
    assert torch.equal(partly.tiles[1, 3][:4], causal[:4])
    assert not torch.equal(partly.tiles[1, 3], causal)


def test_what_the_model_lacks_is_refused(tiny: Tiny) -> None:
    recorder = TileRecorder(0.5, estimator="group")
    with open_llm(tiny(), sparse_policy=recorder) as llm:
        with pytest.raises(ConfigError, match="--layers 2: the model has layers 0 to 1"):
            record(llm, recorder, prompt_of(200), [0, 2], [0])
        with pytest.raises(ConfigError, match="--heads -1: the model has heads 0 to 3"):
            record(llm, recorder, prompt_of(200), [0], [-1])
        with pytest.raises(ConfigError, match="vocabulary"):
            record(llm, recorder, [VOCAB_SIZE], [0], [0])


@pytest.mark.parametrize("position", [0, 0.4, 1])
def test_needle_is_found_in_its_task(position: float) -> None:
    tokenizer = byte_level_tokenizer()
    task = build_task(tokenizer, 1500, position)
    place = find_needle(tokenizer, task)
    assert tokenizer.decode(task.token_ids[place.start : place.stop]) == task.needle


# The picture.


def drawn(path: Path, **changes: Any) -> Any:
    """Draw nine tiles of two layers and heads, and return the pixels, `[height, width, 4]`."""
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    causal = torch.ones(NUM_TILES, NUM_TILES, dtype=torch.bool).tril()
    values: dict[str, Any] = {
        "label": "tiny model",
        "num_tokens": LENGTH,
        "tiles": {(layer, head): causal for layer in (0, 1) for head in (2, 3)},
        "density_by_head": [[0.5] * 4] * 2,
    }
    draw(Selection(**values | changes), path)
    assert path.stat().st_size < 200_000
    return imread(path)


def count(pixels: Any, color: str) -> int:
    from matplotlib.colors import to_rgb

    return int((abs(pixels[..., :3] - to_rgb(color)).max(-1) < 1e-3).sum())


def test_picture_has_its_width_and_is_the_same_again(tmp_path: Path) -> None:
    pixels = drawn(tmp_path / "one.png")
    assert pixels.shape[1] == selection_plot.WIDTH
    assert pixels[0, 0, 3] == 0, "what is outside the card's corners is transparent"
    drawn(tmp_path / "two.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_each_tile_is_drawn_in_whole_pixels(tmp_path: Path) -> None:
    none = torch.zeros(NUM_TILES, NUM_TILES, dtype=torch.bool)
    one = none.clone()
    one[5, 2] = True
    side, _ = selection_plot._panel_size(1, NUM_TILES)
    empty, kept = (
        count(drawn(tmp_path / f"{i}.png", tiles={(0, 0): tiles}), selection_plot._KEPT)
        for i, tiles in enumerate([none, one])
    )
    assert kept - empty == (side // NUM_TILES) ** 2


def test_needle_is_marked_only_if_there_is_one(tmp_path: Path) -> None:
    without = drawn(tmp_path / "without.png")
    marked = drawn(tmp_path / "with.png", needle=range(600, 615))
    assert count(without, selection_plot._NEEDLE) == 0
    assert count(marked, selection_plot._NEEDLE) > 100


def test_long_prompts_have_several_tiles_in_a_pixel(tmp_path: Path) -> None:
    tiles = torch.ones(1024, 1024, dtype=torch.bool).tril()
    drawn(
        tmp_path / "long.png",
        num_tokens=1024 * 128,
        tiles={(layer, 0): tiles for layer in range(5)},
        density_by_head=[[1.0, 0.2]] * 80,
    )


# The command line.


@pytest.fixture
def with_tokenizer(tiny: Tiny, tmp_path: Path) -> Path:
    directory = copy_model(tiny(), tmp_path / "model")
    byte_level_tokenizer().save_pretrained(directory)
    return directory


def run(directory: Path, output: Path, *options: str) -> None:
    chosen = ["--layers", "0", "1", "--heads", "3", "--device", "cpu", "--dtype", "float32"]
    main(["--model", str(directory), "--output", str(output), *chosen, *options])


@pytest.mark.parametrize("where", [[], ["--enable-offload"]], ids=["resident", "offload"])
def test_command_line(with_tokenizer: Path, where: list[str], capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    output = with_tokenizer / "out.png"
    run(with_tokenizer, output, "--input-len", "1200", "--threshold", "5", *where)
    assert output.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "Tile density:" in out
    assert "layer   1:" in out
    assert str(output) in out


def test_command_line_with_own_text(with_tokenizer: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    text, output = with_tokenizer / "text.txt", with_tokenizer / "out.png"
    text.write_text("All work and no play. " * 100, encoding="utf-8")
    run(with_tokenizer, output, "--input-len", "900", "--prompt-file", str(text))
    assert output.is_file()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "7"], "--layers 7: the model has layers 0 to 1"),
        (["--layers", *"012345"], "--layers: 6, but 5 fit a picture"),
        (["--stride", "5"], "sparse_stride=5 is none of"),
        (["--prompt-file", "no/such/text"], "no/such/text"),
        (["--output", "no/such/folder/x.png"], "no/such/folder is not a directory"),
    ],
    ids=str,
)
def test_command_line_refuses(
    with_tokenizer: Path, options: list[str], words: str, capsys: Any
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as exit_:
        run(with_tokenizer, with_tokenizer / "out.png", "--input-len", "800", *options)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Before the model is loaded: there is none at this path."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as exit_:
        main(["--model", "no/such/model"])
    assert exit_.value.code == 2
    assert "pip install 'nanovllm[plots]'" in capsys.readouterr().err
