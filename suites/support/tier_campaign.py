"""A campaign of kills on one set of tiers: a process that migrates a file is killed in a named phase, and each time it
is looked at whether every byte is there, once, where the catalogue says.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from support.tier_mover import task
from support.tier_world import NAMES, expect, place_file

from gdrkit import pattern
from gdrkit.tiers import Phase, TierManager
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from gdrkit.tiers import Configuration

__all__ = ["ANYWHERE", "PHASES", "Campaign", "Mover"]

# Killed from outside, at whatever it does just then.
ANYWHERE = "anywhere"
PHASES = (*(phase.value for phase in Phase), ANYWHERE)
_SUITES = Path(__file__).resolve().parents[1]
_IN_PARTS = frozenset({Phase.COPY.value, Phase.VERIFY.value})
_LARGE_BYTES = 9 * MIB
_ENDS_S = 60


class Mover:
    """The process whose children migrate (:mod:`support.tier_mover`); use it as a context manager."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, (str(_SUITES), os.environ.get("PYTHONPATH", ""))))
        self._child = 0
        self._process = subprocess.Popen(
            [sys.executable, str(_SUITES / "support" / "tier_mover.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": path},
        )

    def start(self, configuration: Configuration, name: str, to: str, **how: object) -> int:
        """Begin a migration; the process that does it."""
        assert self._process.stdin is not None
        self._process.stdin.write(task(configuration, name, to, **how) + "\n")
        self._child = int(self.line().removeprefix("pid "))
        return self._child

    def line(self) -> str:
        """What is said next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the mover has ended"
        return line

    def end(self) -> int:
        """How the process ended: 0, or the signal that killed it, negative."""
        while not (line := self.line()).startswith("ended "):
            pass
        self._child = 0
        return int(line.removeprefix("ended "))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child:  # A case failed while it was stopped.
            os.kill(self._child, signal.SIGKILL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(_ENDS_S)


class Campaign:
    """Files in tiers, and processes that die moving them.

    Parameters
    ----------
    configuration : Configuration
        Of empty tiers named as in :data:`NAMES`.
    mover : Mover
        Whose children are killed.
    seed : int
        Of everything that is drawn: the same seed kills the same processes in the same phases.
    """

    def __init__(self, configuration: Configuration, mover: Mover, *, seed: int) -> None:
        self.configuration = configuration
        self._mover = mover
        self.hits = dict.fromkeys(PHASES, 0)
        self.before = 0
        self._chance = random.Random(seed)
        self._files: dict[str, bytes] = {}
        sizes = {"empty": 0, "small": 17, "folder/page": 4 * KIB, "folder/odd": 100_003, "large": _LARGE_BYTES}
        with TierManager(configuration) as manager:
            for number, (name, size) in enumerate(sizes.items()):
                tier = self._chance.choice(NAMES)
                self._files[name] = place_file(manager, name, size, seed=seed + number, tier=tier)

    def run(self, kills: int) -> None:
        """So many kills, evenly over the phases, in an order that is drawn."""
        while sum(self.hits.values()) < kills:
            left = kills - sum(self.hits.values())
            for phase in self._chance.sample(PHASES, len(PHASES))[:left]:
                self.hit(phase)

    def hit(self, phase: str) -> None:
        """Kill a process in this phase, restart, and look."""
        name = "large" if phase in {*_IN_PARTS, ANYWHERE} else self._chance.choice(sorted(self._files))
        with TierManager(self.configuration) as manager:
            here = manager.find(name).tier
        to = self._chance.choice([tier for tier in NAMES if tier != here])
        try:
            if phase == ANYWHERE:
                self._kill_from_outside(name, to)
            else:
                self._kill_itself(name, to, phase)
            if self._chance.random() < 0.25:
                shutil.rmtree(self.configuration.catalogue)
            expect(self.configuration, self._files)
            self._change()
        except AssertionError as error:
            error.add_note(f"{name}: {here} -> {to}, killed in {phase}; before it {self.hits}")
            raise
        self.hits[phase] += 1

    def _kill_itself(self, name: str, to: str, phase: str) -> None:
        count = self._chance.randint(1, 3) if phase in _IN_PARTS else 1
        self._mover.start(self.configuration, name, to, phase=phase, count=count, how="kill")
        assert self._mover.end() == -signal.SIGKILL, f"it was not killed in {phase}"

    def _kill_from_outside(self, name: str, to: str) -> None:
        """After a line that is drawn; what it does by then nobody knows."""
        process_id = self._mover.start(self.configuration, name, to, say=True)
        for _ in range(self._chance.randint(1, len(PHASES))):
            assert not self._mover.line().startswith("ended")
        # On a busy machine it may be over, and fetched, before we are here.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        self.before += self._mover.end() == -signal.SIGKILL

    def _change(self) -> None:
        """Somebody writes to a file, so that an old copy would be noticed."""
        name = self._chance.choice(sorted(set(self._files) - {"empty"}))
        data = bytearray(self._files[name])
        begin = self._chance.randrange(len(data))
        part = pattern.payload(min(64 * KIB, len(data) - begin), seed=self._chance.randrange(1 << 32))
        with TierManager(self.configuration) as manager, manager.open(name, "r+") as file:
            os.pwrite(file.fileno(), part, begin)
        data[begin : begin + len(part)] = part
        self._files[name] = bytes(data)
