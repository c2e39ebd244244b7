"""Program that runs an all-reduce between the first two GPUs of this host, for the cases of `gdrkit observe`.

`python -m observe.ranks_program FOLDER LENGTH_BYTES ROUNDS` writes the logs of the ranks into the folder. Each rank
makes one all-reduce first, and then one in each round.
"""

from __future__ import annotations

import sys
from pathlib import Path

from support.nccl_job import run_all_reduces

__all__ = ["main"]


def main() -> None:
    """Run the ranks."""
    options = ["--memory", "vmm", "--length-bytes", sys.argv[2], "--rounds", sys.argv[3], "--repeats", "1"]
    run_all_reduces(Path(sys.argv[1]), 2, *options, environ={"NCCL_IB_DISABLE": "1"})


if __name__ == "__main__":
    main()
