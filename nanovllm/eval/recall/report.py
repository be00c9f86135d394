"""What a probe found, as tables and as lines of JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from nanovllm.eval.recall.figures import LOW, LOWEST_PART, Figures, RecallSummary
from nanovllm.eval.text_table import text_table

_NUM_WORST = 5
_LOWEST, _LOW_ROWS = f"worst {LOWEST_PART:.0%}", f"below {LOW}"
_HEADER = ("density", "kept", "oracle", _LOWEST, _LOW_ROWS, "output error")


def as_text(summaries: Mapping[str, RecallSummary]) -> str:
    """Return tables: all policies, all policies by layer, and each policy's worst heads.

    Columns are the fields of `Figures` in their order. By layer there are, for each policy by its
    number in the first table, the mean share kept and the output error.
    """
    policies = [
        (f"{number}  {name}", *_cells(summary.total))
        for number, (name, summary) in enumerate(summaries.items(), 1)
    ]
    tables = [text_table([("policy", *_HEADER), *policies]), _layers(list(summaries.values()))]
    tables += [f"worst heads of {name}\n{_worst(each)}" for name, each in summaries.items()]
    return "\n\n".join(tables)


def as_json_lines(summaries: Mapping[str, RecallSummary]) -> Iterator[str]:
    """Yield one line for each policy, layer and query head: these three, and its `Figures`."""
    for name, summary in summaries.items():
        for (layer, head), figures in summary.by_head.items():
            yield json.dumps({"policy": name, "layer": layer, "head": head} | asdict(figures))


def _layers(summaries: Sequence[RecallSummary]) -> str:
    numbers = range(1, len(summaries) + 1)
    names = [f"{name} {number}" for number in numbers for name in ("kept", "error")]
    rows = [
        (
            str(layer),
            *(
                f"{value:.3f}"
                for summary in summaries
                for value in (summary.by_layer[layer].kept, summary.by_layer[layer].output_error)
            ),
        )
        for layer in summaries[0].by_layer
    ]
    return text_table([("layer", *names), *rows])


def _worst(summary: RecallSummary) -> str:
    """Return a table of the heads that keep least, the worst first."""
    heads = sorted(summary.by_head.items(), key=lambda item: item[1].kept)[:_NUM_WORST]
    rows = [(f"{layer:5d} {head:5d}", *_cells(figures)) for (layer, head), figures in heads]
    return text_table([("layer  head", *_HEADER), *rows])


def _cells(figures: Figures) -> tuple[str, ...]:
    return (
        f"{figures.tile_density:.3f}",
        f"{figures.kept:.3f}",
        f"{figures.oracle_kept:.3f}",
        f"{figures.lowest_kept:.2f}",
        f"{figures.low_rows:.1%}",
        f"{figures.output_error:.3f}",
    )
