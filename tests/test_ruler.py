"""RULER's tasks, as a test and as a command line.

    python tests/test_ruler.py                                   # demo model, 11 tasks, 4096 tokens
    python tests/test_ruler.py --datasets niah_single_2 vt --lengths 2048 4096 --num-samples 20
    python tests/test_ruler.py --model DIR --data-dir DIR --enable-offload --sparse-policy XATTN_BSA
    python tests/test_ruler.py --compare FULL XATTN_BSA:threshold=0.9,stride=16,estimator=row \\
        --json-output answers.jsonl --html-output report.html --plot-output report.png

Without --data-dir the samples are generated. --compare runs the same prompts under each policy and
sets every one against the first; with one policy, it is set against --sparse-policy. Answers in
--json-output are kept: the same command goes on where it was interrupted, and another policy, task,
length or number of samples adds to them. Where nothing is left to do, the report is made from the
answers alone: the model is not opened, unless it is needed to read --data-dir.

TTFT is without the wait for the prompts before. Exit status: 0 all prompts were answered, 1 some
failed, 2 the call was wrong.
"""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm import BackendUnavailableError, CapacityError, ConfigError, __version__
from nanovllm.eval.ruler import TASKS, get_task
from nanovllm.eval.ruler.answers import Answer, AnswerFile
from nanovllm.eval.ruler.page import render_page
from nanovllm.eval.ruler.plot import check_plot, draw
from nanovllm.eval.ruler.policies import PolicySpec, make_policy, parse_policy
from nanovllm.eval.ruler.report import as_markdown, as_text
from nanovllm.eval.ruler.study import Plan, Study, tasks_in
from nanovllm.eval.ruler.summary import StudySummary, summarise

GENERATED = [name for name, task in TASKS.items() if not task.needs_file]
SPARSE_OPTIONS = (
    "threshold",
    "estimator",
    "stride",
    "guard",
    "min_len",
    "dense_layers",
)


def run(*argv):
    """Run the command line; return its exit status, also where it is an error of the call."""
    try:
        return main(list(map(str, argv)))
    except SystemExit as exit_:
        return exit_.code


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--model", "no/such/directory"], "no/such/directory does not exist"),
        (["--datasets", "niah"], "unknown task 'niah'"),
        (["--datasets", "qa_1"], "qa_1 takes questions from"),
        (["--data-dir", "no/data"], "no/data holds no <task>/validation.jsonl"),
        (["--data-dir", "no/data", "--lengths", "4096"], "--lengths is for generated samples"),
        (["--sparse-policy", "SOME"], "'SOME' is none of FULL, XATTN_BSA"),
        (["--sparse-policy", "FULL", "--sparse-threshold", "0.9"], "sparse_threshold"),
        (["--compare", "FULL", "XATTN_BSA:tau=0.9"], "unknown option 'tau'"),
        (["--compare", "FULL", "XATTN_BSA:threshold"], "is not of the form name=value"),
        (
            ["--compare", "FULL", "XATTN_BSA", "--sparse-stride", "8"],
            "write options into --compare",
        ),
        (["--compare", "FULL"], "twice"),
        (["--sample-indices", "1,x"], "sample-indices"),
        (["--sample-indices", "3-1"], "sample-indices"),
        (["--num-samples", "0"], "num-samples"),
        (["--plot-output", "a.png"], "--plot-output draws differences: give --compare"),
        (["--compare", "XATTN_BSA", "--plot-output", "a.pdf"], "must end in .png or .svg"),
        (["--html-output", "tests"], "--html-output tests is a directory"),
    ],
)
def test_wrong_calls_say_what_is_wrong(argv, reason, capsys):
    assert run(*argv) == 2
    assert reason in capsys.readouterr().err


def test_indices_are_numbers_and_ranges():
    assert _indices("0,3,7-9") == [0, 3, 7, 8, 9]
    assert _indices("4") == [4]


def labels(*argv):
    return [policy.label for policy in _policies(_parser().parse_args(argv))]


def test_one_policy_is_compared_with_that_of_the_options():
    sparse = ["--sparse-policy", "xattn_bsa", "--sparse-threshold", "0.9", "--sparse-stride", "16"]
    assert labels("--compare", "FULL", *sparse) == ["FULL", "XATTN_BSA:stride=16,threshold=0.9"]
    assert labels(*sparse) == ["XATTN_BSA:stride=16,threshold=0.9"]
    assert labels("--compare", "XATTN_BSA") == ["XATTN_BSA", "FULL"]
    assert labels() == ["FULL"]


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_demo_model_answers_and_a_study_goes_on_where_it_was(tmp_path, capsys):
    path = tmp_path / "answers.jsonl"
    options = ["--lengths", 700, "--json-output", path, "--quiet"]
    assert run("--datasets", "niah_single_2", "--num-samples", 1, *options) == 0
    out = capsys.readouterr().out
    assert re.search(r"niah_single_2 +700 +1 +1\.000 \[0\.\d+, 1\.000\] +100% +1\.000 ", out)
    before = lines_of(path)
    assert [row["index"] for row in before[1:]] == [0]
    assert all(row["outputs"][0] in row["answer"] for row in before[1:])

    # More samples and another task are added; what is there stays.
    assert run("--datasets", "niah_single_2", "vt", "--num-samples", 2, *options) == 0
    after = lines_of(path)
    assert after[:2] == before
    assert [(row["task"], row["index"]) for row in after[2:]] == [
        ("niah_single_2", 1),
        ("vt", 0),
        ("vt", 1),
    ]
    capsys.readouterr()

    # Nothing is left to do, so not even the model is opened, and the table is the same.
    assert run("--datasets", "niah_single_2", "--sample-indices", "0-0", *options) == 0
    assert lines_of(path) == after
    assert capsys.readouterr().out == out

    assert run("--datasets", "vt", "--seed", 1, *options) == 2
    assert "other settings (seed: 0 there, 1 now)" in capsys.readouterr().err
    assert lines_of(path) == after


def test_reports_are_made_from_answers_alone(tmp_path, capsys, monkeypatch):
    """Where every prompt is answered, the model is not opened."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("nanovllm.eval.ruler.study.LLM", None)
    path, reports = tmp_path / "answers.jsonl", tmp_path / "reports"
    options = ["--datasets", "vt", "--num-samples", "1", "--json-output", str(path)]
    options += ["--compare", "FULL", "XATTN_BSA"]
    answers = [
        Answer(
            policy=policy,
            task="vt",
            length=4096,
            index=0,
            prompt="00ff",
            outputs=["ABCDE"],
            answer=f"It is {policy}.",
            score=score,
            tile_density=1 - score / 2,
            ttft_ms=20.0,
            num_prompt_tokens=4000,
            num_output_tokens=5,
        )
        for policy, score in (("FULL", 0.0), ("XATTN_BSA", 1.0))
    ]
    AnswerFile(path, _settings(_parser().parse_args(options))).add(answers)
    for kind, name in (("markdown", "a.md"), ("html", "a.html"), ("plot", "a.png")):
        options += [f"--{kind}-output", str(reports / name)]
    assert run(*options) == 0
    assert re.search(r"XATTN_BSA against FULL\n.*\nvt +4096 +1 +0\.000", capsys.readouterr().out)
    assert "## `XATTN_BSA` against `FULL`\n" in (reports / "a.md").read_text(encoding="utf-8")
    page = (reports / "a.html").read_text(encoding="utf-8")
    assert "python tests/test_ruler.py --datasets vt --num-samples 1 --json-output" in page
    assert "It is FULL." in page
    assert "It is XATTN_BSA." in page
    assert (reports / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_policies_are_compared_on_the_same_prompts(tmp_path, capsys):
    """With offload: the sparse policy skips tiles, and each prompt is answered under both."""
    path = tmp_path / "answers.jsonl"
    sparse, label = "XATTN_BSA:threshold=0.90,min_len=0", "XATTN_BSA:min_len=0,threshold=0.9"
    options = ["--datasets", "niah_multikey_1", "--lengths", 1100, "--num-samples", 1]
    options += ["--enable-offload", "--block-size", 256, "--num-gpu-blocks", 4, "--quiet"]
    page = tmp_path / "report.html"
    options += ["--compare", "FULL", sparse, "--json-output", path, "--html-output", page]
    assert run(*options) == 0
    out = capsys.readouterr().out
    rows = lines_of(path)[1:]
    assert [row["policy"] for row in rows] == ["FULL", "XATTN_BSA:min_len=0,threshold=0.9"]
    assert rows[0]["prompt"] == rows[1]["prompt"]
    assert rows[0]["tile_density"] == 1
    assert 0.1 < rows[1]["tile_density"] < 0.95
    assert f"{label} against FULL" in out
    assert f"{label} 1 prompts" in re.sub("<[^>]*>", "", page.read_text(encoding="utf-8"))
    assert re.search(r"niah_multikey_1 +1100 +1 +\d\.\d{3} \[.*\] +\d\.\d{3} \[", out)


@pytest.mark.slow
def test_files_are_read_and_prompts_that_do_not_fit_are_told(tmp_path, capsys):
    from transformers import AutoTokenizer

    from nanovllm.eval.ruler import generate, write_samples
    from nanovllm.tools.demo_model import demo_model_path

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    samples = generate("niah_single_1", tokenizer, 500, 2)
    samples += generate("niah_single_1", tokenizer, 1200, 1, indices=[2])
    write_samples(tmp_path, samples)
    data = ["--data-dir", tmp_path, "--quiet", "--max-model-len", 800]
    assert run(*data, "--sample-indices", "0-1") == 0
    assert re.search(r"niah_single_1 +1\d{3} +2 +1\.000", capsys.readouterr().out)
    assert run(*data) == 1
    captured = capsys.readouterr()
    assert re.search(r"niah_single_1 +1\d{3} +2 +1\.000", captured.out)
    assert "sample 2: the prompt has" in captured.err


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        study, policies = _study(args), _policies(args)
        _check_outputs(args, policies)
        options = {
            "max_model_len": args.max_model_len or (None if args.data_dir else max(args.lengths)),
            "kvcache_block_size": args.block_size,
            "dtype": args.dtype,
            "device": args.device,
            "gpu_memory_utilization": args.gpu_utilization,
            "enable_offload": args.enable_offload,
            "num_gpu_blocks": args.num_gpu_blocks,
        }
        answers = {policy.label: study.run(args.model, policy, options) for policy in policies}
        for reason in study.errors:
            print(reason, file=sys.stderr)
        summary = summarise(answers)
        print(as_text(summary))
        words = sys.argv[1:] if argv is None else argv
        _write_reports(args, summary, shlex.join(["python", "tests/test_ruler.py", *words]))
    except (ConfigError, CapacityError, BackendUnavailableError) as error:
        parser.error(str(error))
    return 1 if study.errors else 0


def _check_outputs(args: argparse.Namespace, policies: list[PolicySpec]) -> None:
    """Refuse reports that could not be written, before the answers are waited for."""
    for kind in ("markdown", "html", "plot"):
        path = getattr(args, f"{kind}_output")
        if path is None:
            continue
        if path.is_dir():
            raise ConfigError(f"--{kind}-output {path} is a directory: name a file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--{kind}-output {path}: {error}") from error
    if args.plot_output:
        if len(policies) < 2:
            raise ConfigError("--plot-output draws differences: give --compare")
        check_plot(args.plot_output)


def _write_reports(args: argparse.Namespace, summary: StudySummary, command: str) -> None:
    if args.markdown_output:
        args.markdown_output.write_text(as_markdown(summary), encoding="utf-8")
    if args.html_output:
        page = render_page(summary, command=command, settings=_settings(args))
        args.html_output.write_text(page, encoding="utf-8")
    if args.plot_output:
        draw(summary, args.plot_output)


def _study(args: argparse.Namespace) -> Study:
    if args.data_dir is None:
        args.lengths = args.lengths or [4096]
    elif args.lengths is not None:
        raise ConfigError("--lengths is for generated samples; files have theirs")
    tasks = args.datasets or (tasks_in(args.data_dir) if args.data_dir else GENERATED)
    for name in tasks:
        if get_task(name).needs_file and not (args.data_dir or args.question_file):
            raise ConfigError(f"{name} takes questions from a file: --question-file, or --data-dir")
    plan = Plan(
        tasks=tasks,
        lengths=args.lengths or (),
        num_samples=args.num_samples,
        indices=args.sample_indices,
        seed=args.seed,
        data_dir=args.data_dir,
        question_file=args.question_file,
        max_new_tokens=args.max_new_tokens,
    )
    return Study(
        plan,
        file=AnswerFile(args.json_output, _settings(args)) if args.json_output else None,
        show=(lambda line: None) if args.quiet else lambda line: print(line, flush=True),
        use_tqdm=not args.quiet,
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what must be alike of all answers in a file."""
    shared = ("model", "device", "dtype", "seed", "max_new_tokens")
    shared += ("enable_offload", "num_gpu_blocks", "block_size")
    return (
        {"version": __version__}
        | {name: getattr(args, name) for name in shared}
        | {
            name: str(path) if (path := getattr(args, name)) else None
            for name in ("data_dir", "question_file")
        }
    )


def _policies(args: argparse.Namespace) -> list[PolicySpec]:
    """Return the policies to run, the one that the others are set against first."""
    given = {
        name: value
        for name in SPARSE_OPTIONS
        if (value := getattr(args, f"sparse_{name}")) is not None
    }
    compared = [parse_policy(text) for text in args.compare or ()]
    if len(compared) > 1 and (given or args.sparse_policy):
        raise ConfigError("with several policies, write options into --compare")
    if len(compared) < 2:
        compared.append(make_policy(args.sparse_policy or "FULL", given))
    labels = [policy.label for policy in compared]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"a policy stands in the comparison twice: {', '.join(labels)}")
    return compared


def _indices(text: str) -> list[int]:
    """Return the numbers of a text such as `0,3,7-9`."""
    indices: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not span:
            raise ValueError(text)
        indices += span
    return indices


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo", help="Hugging Face directory, or demo")
    add("--data-dir", type=Path, help="RULER's files, <task>/validation.jsonl; default: generate")
    add("--datasets", nargs="+", help="tasks; default: all that need no file, or all files")
    add("--lengths", type=_positive, nargs="+", help="tokens of prompt and answer; default 4096")
    add("--num-samples", type=_positive, help="of each task and length; default 10, of files all")
    add("--sample-indices", type=_indices, help="these samples only, such as 0,3,7-9")
    add("--seed", type=int, default=0, help="of generated samples")
    add("--question-file", type=Path, help="SQuAD or HotpotQA in JSON, to generate qa_1 or qa_2")
    add("--max-model-len", type=int, help="tokens of prompt and answer; default: what they need")
    add("--max-new-tokens", type=_positive, help="most tokens of an answer; default: the task's")
    add("--enable-offload", action="store_true", help="keep the KV cache in host memory")
    add("--num-gpu-blocks", type=int, help="slots of the ring, with offload")
    add("--block-size", type=int, help="tokens in a KV block; default 256, with offload 1024")
    add("--gpu-utilization", type=float, default=0.9, help="share of the GPU's memory to use")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--sparse-policy", help="default FULL")
    add("--sparse-threshold", type=float, help="share of attention mass to keep")
    add("--sparse-estimator", help="group or row")
    add("--sparse-stride", type=int, help="of the estimate")
    add("--sparse-guard", type=float, help="keep tiles with more than this share of a row's mass")
    add("--sparse-min-len", type=int, help="tokens at positions before are dense")
    add("--sparse-dense-layers", type=int, help="the first layers that are dense")
    add("--compare", nargs="+", metavar="POLICY", help="such as FULL, XATTN_BSA:threshold=0.9")
    add("--json-output", type=Path, help="file of answers, a JSON line each; made or added to")
    add("--markdown-output", type=Path, help="file for the tables, in Markdown")
    add("--html-output", type=Path, help="file for the report: tables, and prompts that differ")
    add("--plot-output", type=Path, help="file for a picture, .png or .svg; needs --compare")
    add("--quiet", action="store_true", help="print the tables alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
