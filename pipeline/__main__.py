"""``python -m pipeline``, and ``brevis``."""

from __future__ import annotations

import gc
import os
import sys


def run() -> int:
    """Run the command of this process; return its exit code."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # for numpy: nothing here needs its threads, which spin a while
    gc.disable()  # imports make many objects that stay: to look for cycles among them takes a fifth of the start
    from pipeline.cli import main

    gc.freeze()
    gc.enable()
    return main()


if __name__ == "__main__":
    sys.exit(run())
