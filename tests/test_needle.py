"""Needle in a haystack, as a test and as a command line.

    python tests/test_needle.py                                  # demo model, 4096 tokens
    python tests/test_needle.py --model DIR --input-len 32768 --needle-position 0.25
    python tests/test_needle.py --enable-offload                 # KV cache in host memory
    python tests/test_needle.py --enable-offload --enable-xattn-bsa --sparse-threshold 9

Exit status: 0 the needle was found, 1 it was not, 2 the call was wrong.
"""

import argparse
import re
import sys

import pytest

from nanovllm import LLM, XATTN_BSA, BackendUnavailableError, CapacityError, ConfigError
from nanovllm.eval.haystack import sentences
from nanovllm.eval.needle import (
    DEFAULT_VALUE,
    build_task,
    describe,
    describe_attention,
    describe_transfers,
    run_task,
)

NOT_YET = ("enable_quest",)


@pytest.fixture(scope="module")
def demo():
    with LLM("demo", max_model_len=2048) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize("position", [0.0, 0.37, 1.0])
def test_demo_model_finds_the_needle(demo, position):
    result = run_task(demo, build_task(demo.tokenizer, 1024, position, "5318008"))
    assert result.num_prompt_tokens == 1024
    assert result.passed, result.answer


@pytest.mark.slow
def test_without_the_needle_there_is_nothing_to_find(demo):
    """Control: the value comes from the text, not from the question or the model."""
    task = build_task(demo.tokenizer, 1024, 0.37, "5318008")
    needle = demo.tokenizer.encode("The magic number of the lighthouse is 5318008. ")
    start = next(i for i in range(1024) if task.token_ids[i : i + len(needle)] == needle)
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


def test_command_line_refuses_what_is_not_built(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--enable-quest"])
    assert exit_.value.code == 2
    assert "--enable-quest is not built yet" in capsys.readouterr().err


def test_command_line_passes_on_what_the_engine_refuses(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--model", "no/such/directory"])
    assert exit_.value.code == 2
    assert "no/such/directory does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_command_line_tells_by_its_exit_status(capsys):
    assert main(["--input-len", "512", "--max-model-len", "256"]) == 2
    assert "the prompt has 512 tokens" in capsys.readouterr().out
    assert main(["--input-len", "512", "--max-model-len", "1024", "--needle-value", "8675309"]) == 0
    assert "PASS" in capsys.readouterr().out
    assert main(["--input-len", "512", "--max-model-len", "1024", "--max-new-tokens", "1"]) == 1
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
    """At 4,096 tokens, most tiles of which are skipped, the needle is found."""
    sparse = ["--enable-xattn-bsa", "--sparse-threshold", "9"]
    assert main(["--input-len", "4096", *where, *sparse]) == 0
    out = capsys.readouterr().out
    skipped = int(re.search(r"Attention: (\d+)% of the prefill's was skipped", out).group(1))
    assert 20 < skipped < 90
    assert ("KV cache:" in out) == bool(where)


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    for name in NOT_YET:
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')} is not built yet")
    max_model_len = args.max_model_len or args.input_len + args.max_new_tokens
    try:
        with LLM(
            args.model,
            max_model_len=max_model_len,
            kvcache_block_size=args.block_size,
            gpu_memory_utilization=args.gpu_utilization,
            dtype=args.dtype,
            device=args.device,
            enforce_eager=args.enforce_eager,
            enable_offload=args.enable_offload,
            num_gpu_blocks=args.num_gpu_blocks,
            prefill_order=args.prefill_order,
            **_sparse_options(args),
        ) as llm:
            task = build_task(
                llm.tokenizer, args.input_len, args.needle_position, args.needle_value, args.seed
            )
            result = run_task(llm, task, args.max_new_tokens)
            stats = llm.stats()
    except (ConfigError, CapacityError, BackendUnavailableError) as error:
        parser.error(str(error))
    print("\n".join([describe(result), *describe_attention(stats), *describe_transfers(stats)]))
    return 2 if result.error else 0 if result.passed else 1


def _sparse_options(args: argparse.Namespace) -> dict[str, object]:
    if not args.enable_xattn_bsa:
        return {}
    given = {
        "sparse_threshold": args.sparse_threshold,
        "sparse_estimator": args.sparse_estimator,
        "sparse_stride": args.sparse_stride,
        "sparse_guard": args.sparse_guard,
        "sparse_min_len": args.sparse_min_len,
    }
    options = {name: value for name, value in given.items() if value is not None}
    return {"sparse_policy": XATTN_BSA, **options}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="demo", help="Hugging Face directory, or demo")
    add("--input-len", type=int, default=4096, help="tokens of the prompt")
    add("--needle-position", type=float, default=0.5, help="share of the text before it, 0 to 1")
    add("--needle-value", default=DEFAULT_VALUE, help="what is to be found")
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
    add("--enable-quest", action="store_true", help="not built yet")
    return parser


if __name__ == "__main__":
    sys.exit(main())
