"""Loggers of the package: `nanovllm.*`, silent below `NANOVLLM_LOG_LEVEL` (default INFO)."""

import logging
import os
import sys

_FORMAT = "%(levelname)s %(asctime)s %(name)s] %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Return the logger called `name`, a dotted name under `nanovllm`.

    The package's handler is attached once, to the `nanovllm` logger, and writes to stderr. An
    application that has configured that logger itself keeps its own handlers and level.
    """
    root = logging.getLogger("nanovllm")
    if not root.handlers and root.level == logging.NOTSET:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(os.environ.get("NANOVLLM_LOG_LEVEL", "INFO").upper())
        root.propagate = False
    return logging.getLogger(name)
