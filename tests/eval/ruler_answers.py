"""Hand-made answers of a RULER study, and small studies of them."""

from dataclasses import replace

from nanovllm.eval.ruler.answers import Answer
from nanovllm.eval.ruler.summary import summarise

SPARSE = "XATTN_BSA:threshold=0.9"
FULL_ANSWER = Answer(
    policy="FULL",
    task="vt",
    length=1024,
    index=0,
    prompt="00ff",
    outputs=["ABCDE"],
    answer=" it is “ABCDE”\n",
    score=1.0,
    tile_density=1.0,
    ttft_ms=10.0,
    num_prompt_tokens=990,
    num_output_tokens=7,
)
SPARSE_ANSWER = replace(
    FULL_ANSWER, policy=SPARSE, answer=" it is ABCDX", tile_density=0.25, ttft_ms=25.0
)


def full(scores, **changes):
    return [replace(FULL_ANSWER, index=i, score=s, **changes) for i, s in enumerate(scores)]


def sparse(scores, **changes):
    return [replace(SPARSE_ANSWER, index=i, score=s, **changes) for i, s in enumerate(scores)]


def small_study():
    """Two tasks of one length: one win, one loss; and a task that the base cannot do."""
    return summarise(
        {
            "FULL": full([1, 1, 0.5, 0]) + full([0, 0], task="cwe"),
            SPARSE: sparse([1, 0, 1, 0]) + sparse([0, 0], task="cwe", tile_density=0.5),
        }
    )


NOTHING_SHARED = [
    {"FULL": full([1]), SPARSE: []},
    {"FULL": [], SPARSE: sparse([1])},
    {"FULL": full([1]), SPARSE: sparse([1], length=2048)},
    {"FULL": [], SPARSE: []},
]
"""Answers of studies whose policies have no prompt in common."""
