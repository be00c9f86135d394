"""A small language model finds one sentence in 4,000 tokens of text, then answers a question.

Its KV cache lies in host memory. Of the prompt's attention it computes only the tiles that matter,
and for each token of the answer it reads a quarter of the cache. Run with `make demo`, or
`python example.py [MODEL_DIRECTORY]`.
"""

import sys

from nanovllm import LLM, QUEST, XATTN_BSA, SamplingParams
from nanovllm.eval.needle import (
    build_task,
    describe,
    describe_attention,
    describe_transfers,
    run_task,
)


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    with LLM(
        model,
        max_model_len=4096,
        max_num_seqs=1,
        enable_offload=True,
        sparse_policy=XATTN_BSA,
        sparse_min_len=0,  # a longer prompt is worth it; here it shows what is skipped
        decode_policy=QUEST,
        decode_token_budget=1024,
    ) as llm:
        print("\nA needle in a haystack:\n")
        result = run_task(llm, build_task(llm.tokenizer, input_len=4000, position=0.6))
        stats = llm.stats()
        lines = [describe(result), *describe_attention(stats), *describe_transfers(stats)]
        print("\n".join(lines))

        print("\nAnd a stream of tokens:\n")
        params = SamplingParams(temperature=0, max_tokens=60)
        for piece in llm.stream("The most important thing about a good library is", params):
            print(piece.text, end="", flush=True)
        print("\n")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
