"""A program that opens files, for the cases that count opens by other programs.

``python -m support.file_opener`` executes one task for each line of standard input, and prints ``done`` after each.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from support.processes import LineChildProcess

from gdrkit.tiers import Configuration, Tier, TierManager

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FileOpener"]

# Maximum number of searches for a file. A search through the folders can miss a file that moves meanwhile.
_SEARCHES_MAX = 16


class FileOpener(LineChildProcess):
    """The program as a child process."""

    def __init__(self) -> None:
        super().__init__("support.file_opener")

    def open_files(self, folders: Sequence[Path], open_counts: Mapping[str, int], *, seed: int = 0) -> None:
        """Open and read each file `open_counts[name]` times, in random order, and wait for the end.

        Each file is in one of the folders, and may move to another folder at any time. The kernel (fanotify) merges
        equal events of one process. So each process opens a file at most once, and `open_counts[name]` processes open
        the file.
        """
        self._execute({"folders": [str(folder) for folder in folders], "open_counts": dict(open_counts), "seed": seed})

    def open_by_name(self, configuration: Configuration, name: str, *, count: int) -> None:
        """Open a file of the tiers `count` times by a :class:`TierManager`.

        The manager stays open until the end of the program.
        """
        tiers = [(tier.name, str(tier.directory), tier.accesses_min) for tier in configuration.tiers]
        self._execute({"tiers": tiers, "catalogue": str(configuration.catalogue), "name": name, "count": count})

    def _execute(self, task: Mapping[str, object]) -> None:
        self.write_line(json.dumps(task))
        self.expect_line("done")


def _open_in_rounds(folders: Sequence[str], open_counts: Mapping[str, int], *, seed: int) -> None:
    """Fork a child for each round. The child opens each file that still needs an open, in random order."""
    rng = random.Random(seed)
    for round_index in range(max(open_counts.values(), default=0)):
        names = [name for name, open_count in open_counts.items() if open_count > round_index]
        rng.shuffle(names)
        child_pid = os.fork()
        if child_pid == 0:
            for name in names:
                _read_file(folders, name)
            os._exit(0)
        assert os.waitpid(child_pid, 0)[1] == 0


def _read_file(folders: Sequence[str], name: str) -> None:
    """Read the file `name`, which may move from folder to folder meanwhile."""
    for folder in itertools.islice(itertools.cycle(folders), _SEARCHES_MAX * len(folders)):
        with contextlib.suppress(FileNotFoundError):
            Path(folder, name).read_bytes()
            return
    raise FileNotFoundError(name)


def main() -> None:
    """Execute the tasks of :class:`FileOpener`."""
    with ExitStack() as stack:
        for line in sys.stdin:
            task = json.loads(line)
            if "open_counts" in task:
                _open_in_rounds(task["folders"], task["open_counts"], seed=task["seed"])
            else:
                tiers = tuple(
                    Tier(name, Path(directory), accesses_min) for name, directory, accesses_min in task["tiers"]
                )
                manager = stack.enter_context(
                    TierManager(Configuration(tiers=tiers, catalogue=Path(task["catalogue"])))
                )
                for _ in range(task["count"]):
                    manager.open(task["name"]).close()
            print("done", flush=True)  # noqa: T201 - the protocol of the program.


if __name__ == "__main__":
    main()
