"""Needle in a haystack, as a test and as a command line.

    python tests/test_needle.py                                  # demo model, 4096 tokens
    python tests/test_needle.py --model DIR --input-len 32768 --needle-position 0.25
    python tests/test_needle.py --enable-offload                 # KV cache in host memory
    python tests/test_needle.py --enable-offload --enable-xattn-bsa --sparse-threshold 9
    python tests/test_needle.py --grid-lengths 1024 2048 4096 --grid-depths 5 --repeats 3 \\
        --json-output grid.jsonl --heat-map grid.png         # depth x length, and a picture

--grid-lengths looks for needles at every depth of prompts of every length, each with a text and a
number of its own. Answers in --json-output are kept: the same command goes on where it was
interrupted, and another policy, length, number of depths or repeats adds to them. --heat-map draws
all policies of that file beside each other.

Exit status: 0 all needles were found, 1 some were not, 2 the call was wrong or a prompt failed.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm import (
    LLM,
    QUEST,
    XATTN_BSA,
    BackendUnavailableError,
    CapacityError,
    ConfigError,
    __version__,
)
from nanovllm.config import Config
from nanovllm.eval.haystack import sentences
from nanovllm.eval.heat_map import check_picture, draw
from nanovllm.eval.needle import (
    DEFAULT_VALUE,
    build_task,
    describe,
    describe_attention,
    describe_transfers,
    run_task,
)
from nanovllm.eval.needle_grid import NeedleAnswer, NeedleGrid, run_grid, spread_depths
from nanovllm.eval.needle_summary import as_text, summarise
from nanovllm.eval.record_file import RecordFile
from nanovllm.eval.ruler.policies import PolicySpec, make_policy

# Options of one mode only, and their defaults.
ONE_NEEDLE = {"input_len": 4096, "needle_position": 0.5, "needle_value": DEFAULT_VALUE}
GRID = {"grid_depths": 5, "repeats": 1, "json_output": None, "heat_map": None}


@pytest.fixture(scope="module")
def demo():
    with LLM("demo", max_model_len=2048) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize("position", [0.0, 0.37, 1.0])
def test_demo_model_finds_the_needle(demo, position):
    result = run_task(demo, build_task(demo.tokenizer, 640, position, "5318008"))
    assert result.num_prompt_tokens == 640
    assert result.passed, result.answer


@pytest.mark.slow
def test_without_the_needle_there_is_nothing_to_find(demo):
    """Control: the value comes from the text, not from the question or the model."""
    task = build_task(demo.tokenizer, 640, 0.37, "5318008")
    needle = demo.tokenizer.encode("The magic number of the lighthouse is 5318008. ")
    start = next(i for i in range(640) if task.token_ids[i : i + len(needle)] == needle)
    del task.token_ids[start : start + len(needle)]
    assert not run_task(demo, task).passed


@pytest.mark.slow
@pytest.mark.parametrize("input_len", [100, 257, 4096])
@pytest.mark.parametrize("position", [0.0, 0.5, 0.999, 1.0])
def test_task_has_the_length_and_place_asked_for(demo, input_len, position):
    task = build_task(demo.tokenizer, input_len, position, seed=3)
    text = demo.tokenizer.decode(task.token_ids)
    assert len(task.token_ids) == input_len
    assert text.count(DEFAULT_VALUE) == 1
    body = text[text.index("\n\n") : text.rindex("\n\n")]
    assert body.index(task.needle) / len(body) == pytest.approx(
        position, abs=120 / len(body) + 0.01
    )


@pytest.mark.parametrize(("input_len", "position"), [(20, 0.5), (1024, 1.5), (1024, -0.1)])
def test_impossible_tasks_are_refused(input_len, position):
    class Bytes:
        chat_template = None
        bos_token = None

        def encode(self, text, add_special_tokens):
            return list(text.encode())

    with pytest.raises(ConfigError, match=r"input_len|position"):
        build_task(Bytes(), input_len, position)


def test_haystack_is_seeded_and_has_no_digits():
    def first(seed):
        stream = sentences(seed)
        return "".join(next(stream) for _ in range(200))

    assert first(1) == first(1) != first(2)
    assert not any(c.isdigit() for c in first(1))


def test_command_line_passes_on_what_the_engine_refuses(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--model", "no/such/directory"])
    assert exit_.value.code == 2
    assert "no/such/directory does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--repeats", "2"], "--repeats is for a grid: give --grid-lengths"),
        (["--grid-depths", "3"], "--grid-depths is for a grid"),
        (["--json-output", "a.jsonl"], "--json-output is for a grid"),
        (["--heat-map", "a.png"], "--heat-map is for a grid"),
        (["--grid-lengths", "512", "--input-len", "512"], "--input-len is for one needle"),
        (["--grid-lengths", "512", "--needle-value", "1"], "--needle-value is for one needle"),
        (
            ["--grid-lengths", "512", "--needle-position", "0"],
            "--needle-position is for one needle",
        ),
        (["--grid-lengths", "512", "--grid-depths", "0"], "0 depths: at least 1"),
        (["--grid-lengths", "512", "--repeats", "0"], "num_repeats 0 is not an integer >= 1"),
        (["--grid-lengths", "512", "--heat-map", "a.pdf"], "the name must end in .png"),
        (["--grid-lengths", "512", "--json-output", "tests"], "cannot be read and written"),
        (["--grid-lengths", "512", "--model", "no/such/directory"], "does not exist"),
    ],
)
def test_command_line_tells_what_belongs_to_a_grid_and_what_does_not(argv, reason, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


def policy_of(*argv):
    return _policy(_parser().parse_args(argv))


def test_policies_are_named_by_what_their_options_mean():
    assert policy_of().label == "FULL"
    tenths, share = (
        policy_of("--enable-xattn-bsa", "--sparse-threshold", value, "--sparse-stride", "16")
        for value in ("9", "0.9")
    )
    assert tenths == share
    assert tenths.label == "XATTN_BSA:min_len=0,stride=16,threshold=0.9"
    assert tenths.options == {
        "sparse_policy": XATTN_BSA,
        "sparse_min_len": 0,
        "sparse_stride": 16,
        "sparse_threshold": 0.9,
    }


@pytest.mark.slow
def test_command_line_fills_a_grid_and_goes_on_with_another_policy(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "grid.jsonl", tmp_path / "new" / "grid.png"
    grid = ["--grid-lengths", "220", "140", "--grid-depths", "2", "--json-output", str(path)]
    assert main([*grid, "--heat-map", str(picture)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"depth +140 +220\n +0% +100% +100%\n +100% +100% +100%\n", out)
    dense, content = path.read_text(encoding="utf-8"), picture.read_bytes()
    rows = [json.loads(line) for line in dense.splitlines()[1:]]
    assert [(row["length"], row["depth"]) for row in rows] == [
        (140, 0.0),
        (140, 1.0),
        (220, 0.0),
        (220, 1.0),
    ]
    assert all(row["value"] in row["answer"] for row in rows)

    # One token is too few for seven digits: with it, needles are missed.
    assert main([*grid[:5], "--max-new-tokens", "1"]) == 1
    assert "FULL: 0 of 4 needles found" in capsys.readouterr().out

    status = main([*grid, "--heat-map", str(picture), "--enable-xattn-bsa"])
    assert "XATTN_BSA:min_len=0: " in capsys.readouterr().out
    assert path.read_text(encoding="utf-8").startswith(dense)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[5:]]
    assert [row["policy"] for row in rows] == ["XATTN_BSA:min_len=0"] * 4
    assert status == (0 if all(row["passed"] for row in rows) else 1)
    assert picture.read_bytes() != content

    with pytest.raises(SystemExit):
        main([*grid, "--seed", "1"])
    assert "other settings (seed: 0 there, 1 now)" in capsys.readouterr().err


@pytest.mark.slow
def test_command_line_tells_by_its_exit_status(capsys):
    assert main(["--input-len", "256", "--max-model-len", "128"]) == 2
    assert "the prompt has 256 tokens" in capsys.readouterr().out
    assert main(["--input-len", "256", "--max-model-len", "512", "--needle-value", "8675309"]) == 0
    assert "PASS" in capsys.readouterr().out
    assert main(["--input-len", "256", "--max-model-len", "512", "--max-new-tokens", "1"]) == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.slow
def test_command_line_with_the_cache_in_host_memory(capsys):
    options = ["--input-len", "600", "--enable-offload", "--block-size", "128"]
    assert main([*options, "--num-gpu-blocks", "2", "--prefill-order", "chunk"]) == 0
    out = capsys.readouterr().out
    assert "PASS" in out
    assert "KV cache:" in out


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["--enable-offload"]], ids=["resident", "offload"])
def test_command_line_with_sparse_attention(where, capsys):
    """Of 2,048 tokens a fifth of the prefill's attention is skipped or more, and decode reads a
    quarter: the needle is found."""
    prefill = ["--enable-xattn-bsa", "--sparse-threshold", "9"]
    decode = ["--enable-quest", "--decode-token-budget", "512"]
    assert main(["--input-len", "2048", *where, *prefill, *decode]) == 0
    out = capsys.readouterr().out
    skipped = int(re.search(r"Attention: (\d+)% of the prefill's was skipped", out).group(1))
    assert 20 < skipped < 90
    assert ("KV cache:" in out) == bool(where)
    assert ("pages that decode wanted were on the device" in out) == bool(where)


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _choose_mode(args)
        return _find_grid(args) if args.grid_lengths else _find_one(args)
    except (ConfigError, CapacityError, BackendUnavailableError, OSError) as error:
        parser.error(str(error))


def _choose_mode(args: argparse.Namespace) -> None:
    """Fill in the defaults of one needle or of a grid, and refuse options of the other."""
    used, refused = (GRID, ONE_NEEDLE) if args.grid_lengths else (ONE_NEEDLE, GRID)
    for name in refused:
        if getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{option} is for one needle: leave it out, or --grid-lengths"
                if args.grid_lengths
                else f"{option} is for a grid: give --grid-lengths"
            )
    for name, default in used.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def _find_one(args: argparse.Namespace) -> int:
    options = _llm_options(args, args.input_len) | _sparse_options(args)
    with LLM(args.model, **options) as llm:
        task = build_task(
            llm.tokenizer, args.input_len, args.needle_position, args.needle_value, args.seed
        )
        result = run_task(llm, task, args.max_new_tokens)
        stats = llm.stats()
    print("\n".join([describe(result), *describe_attention(stats), *describe_transfers(stats)]))
    return 2 if result.error else 0 if result.passed else 1


def _find_grid(args: argparse.Namespace) -> int:
    grid = NeedleGrid(
        lengths=sorted(set(args.grid_lengths)),
        depths=spread_depths(args.grid_depths),
        num_repeats=args.repeats,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
    )
    policy, options = _policy(args), _llm_options(args, max(grid.lengths))
    if args.heat_map:
        check_picture(args.heat_map)
        args.heat_map.parent.mkdir(parents=True, exist_ok=True)
    file = None
    if args.json_output:
        file = RecordFile(args.json_output, _settings(args), NeedleAnswer, "needle answer")
    answers, errors = run_grid(args.model, policy, grid, options, file, use_tqdm=True)
    for reason in errors:
        print(reason, file=sys.stderr)
    for summary in summarise(answers):
        print(as_text(summary))
    drawn = summarise(file.records if file else answers)
    if args.heat_map and drawn:
        draw(drawn, args.heat_map)
        print(f"\nPicture: {args.heat_map}")
    return 2 if errors else 0 if all(answer.passed for answer in answers) else 1


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what must be alike of all answers in a file."""
    shared = ("model", "device", "dtype", "seed", "max_new_tokens")
    shared += ("enable_offload", "num_gpu_blocks", "block_size", "prefill_order")
    return {"version": __version__} | {name: getattr(args, name) for name in shared}


def _llm_options(args: argparse.Namespace, max_prompt_len: int) -> dict[str, Any]:
    return {
        "max_model_len": args.max_model_len or max_prompt_len + args.max_new_tokens,
        "kvcache_block_size": args.block_size,
        "gpu_memory_utilization": args.gpu_utilization,
        "dtype": args.dtype,
        "device": args.device,
        "enforce_eager": args.enforce_eager,
        "enable_offload": args.enable_offload,
        "num_gpu_blocks": args.num_gpu_blocks,
        "prefill_order": args.prefill_order,
    }


def _policy(args: argparse.Namespace) -> PolicySpec:
    """Return the policy with its options as `Config` reads them: 9 and 0.9 are one policy."""
    given = _sparse_options(args)
    config = Config(model=args.model, **given)
    return make_policy(
        config.sparse_policy.name,
        {
            name.removeprefix("sparse_"): getattr(config, name)
            for name in given
            if name != "sparse_policy"
        },
    )


def _sparse_options(args: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if args.enable_xattn_bsa:
        given |= {
            "sparse_policy": XATTN_BSA,
            "sparse_threshold": args.sparse_threshold,
            "sparse_estimator": args.sparse_estimator,
            "sparse_stride": args.sparse_stride,
            "sparse_guard": args.sparse_guard,
            "sparse_min_len": args.sparse_min_len,
        }
    if args.enable_quest:
        given |= {"decode_policy": QUEST, "decode_token_budget": args.decode_token_budget}
    return {name: value for name, value in given.items() if value is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo", help="Hugging Face directory, or demo")
    add("--input-len", type=int, help="tokens of the prompt; default 4096")
    add("--needle-position", type=float, help="share of the text before it, 0 to 1; default 0.5")
    add("--needle-value", help=f"what is to be found; default {DEFAULT_VALUE}")
    add("--grid-lengths", type=int, nargs="+", help="tokens of the prompts of a grid")
    add("--grid-depths", type=int, help="how many, evenly from 0 to 1; default 5")
    add("--repeats", type=int, help="prompts of each length and depth of a grid; default 1")
    add("--json-output", type=Path, help="keep a grid's answers here, and go on with those there")
    add("--heat-map", type=Path, help="draw a grid as a PNG; needs the extra plots")
    add("--max-model-len", type=int, help="tokens of prompt and answer; default: what they need")
    add("--max-new-tokens", type=int, default=32, help="most tokens of the answer")
    add("--block-size", type=int, help="tokens in a KV block; default 256, with offload 1024")
    add("--gpu-utilization", type=float, default=0.9, help="share of the GPU's memory to use")
    add("--dtype", default="auto")
    add("--device", default="auto")
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--seed", type=int, default=0, help="chooses the text around the needle")
    add("--enable-offload", action="store_true", help="keep the KV cache in host memory")
    add("--num-gpu-blocks", type=int, help="slots of the ring, with offload")
    add("--prefill-order", default="auto", help="auto, layer or chunk, with offload")
    add("--enable-xattn-bsa", action="store_true", help="sparse attention in prefill")
    add("--sparse-threshold", type=float, help="share of attention mass to keep; 9 means 0.9")
    add("--sparse-estimator", help="group or row")
    add("--sparse-stride", type=int, help="of the estimate")
    add("--sparse-guard", type=float, help="keep tiles with more than this share of a row's mass")
    add("--sparse-min-len", type=int, default=0, help="tokens at positions before are dense")
    add("--enable-quest", action="store_true", help="sparse attention in decode")
    add("--decode-token-budget", type=int, help="tokens that each KV head attends to in decode")
    return parser


if __name__ == "__main__":
    sys.exit(main())
