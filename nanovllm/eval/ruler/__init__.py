"""RULER's thirteen long-context tasks, worded anew, for any tokenizer and any length.

The tasks and their parameters are those of RULER (Hsieh et al. 2024, arXiv:2404.06654); every
prompt, word list and haystack is this package's own. Files that RULER's scripts wrote are read too.

`study` lets a model answer samples under one or more policies; `summary` makes figures of the
answers, `report` writes them as tables, `page` as HTML, and `plot` draws them.
"""

from nanovllm.eval.ruler.sample import Sample, read_samples, write_samples
from nanovllm.eval.ruler.scoring import PASS_SCORE, score
from nanovllm.eval.ruler.tasks import TASKS, Task, generate, get_task

__all__ = [
    "PASS_SCORE",
    "TASKS",
    "Sample",
    "Task",
    "generate",
    "get_task",
    "read_samples",
    "score",
    "write_samples",
]
