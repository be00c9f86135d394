"""How much of the true attention a sparse policy keeps: the reason behind an accuracy figure.

A prefill attends densely while policies choose tiles of the same queries and keys. For whole query
tiles, drawn at random, dense attention tells which share of every row's attention mass lies in the
key tiles that a policy would keep, the most that as many key tiles could hold, and how far the
output inside the kept tiles is from the dense one.

Query tiles are drawn and not rows, since a policy chooses for a query tile: only all of its rows
together say which key tiles hold the most.
"""

from nanovllm.eval.recall.dense_tile import TileRecall, measure_tile
from nanovllm.eval.recall.figures import Figures, Recall, RecallSummary
from nanovllm.eval.recall.probe import RecallProbe, draw_query_tiles

__all__ = [
    "Figures",
    "Recall",
    "RecallProbe",
    "RecallSummary",
    "TileRecall",
    "draw_query_tiles",
    "measure_tile",
]
