"""Kill campaign for the migration of files between storage tiers.

The campaign kills a process while it migrates a file. After each kill, the campaign checks that every file is in
exactly one tier, has all its bytes, and is in the catalogue.

``python -m support.tier_campaign`` is the program of :class:`MigrationProcess`, the process that migrates files.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from support.kill_campaign import KillCampaign
from support.processes import LineChildProcess
from support.tier_world import TIER_NAMES, check_tiers, create_file

from gdrkit import pattern
from gdrkit.errors import ApiError, Reason
from gdrkit.tiers import Configuration, Phase, Tier, TierManager
from gdrkit.tiers.background import BackgroundRun, RunOutput
from gdrkit.tiers.schedule import RunSettings
from gdrkit.units import KIB, MIB

__all__ = ["ANYWHERE", "PHASES", "MigrationProcess", "TierCampaign"]

# With this value instead of a phase, the campaign kills the process from outside, after a random number of phases.
ANYWHERE = "anywhere"
PHASES = (*(phase.value for phase in Phase), ANYWHERE)
# Phases that begin several times during the migration of a large file: once for each chunk.
_REPEATED_PHASES = frozenset({Phase.COPY.value, Phase.VERIFY.value})
_LARGE_BYTES = 9 * MIB
# Rate limit of a background run.
_RATE_BYTES_PER_S = 100 * MIB
# Exit codes of a migration.
_BUSY_EXIT_CODE, _FAILED_EXIT_CODE = 1, 2
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class MigrationProcess(LineChildProcess):
    """A process that migrates files. It forks a child process for each migration.

    A campaign makes hundreds of migrations. With the fork, Python imports the modules only once for all of them.
    """

    def __init__(self) -> None:
        super().__init__("support.tier_campaign")
        # Process id of the running migration; 0 if none runs.
        self._migration_process_id = 0

    def start(
        self,
        configuration: Configuration,
        name: str,
        tier_name: str,
        *,
        phase: str | None = None,
        phase_begin_count: int = 1,
        signal_name: str = "kill",
        prints_phases: bool = False,
        in_background: bool = False,
    ) -> int:
        """Start a migration, and return the id of its process.

        Parameters
        ----------
        configuration : Configuration
            The tiers and the catalogue.
        name : str
            Name of the file.
        tier_name : str
            Name of the new tier.
        phase : str, optional
            Phase in which the process sends a signal to itself; None for no signal.
        phase_begin_count : int
            The process sends the signal when the phase has begun this number of times.
        signal_name : str
            The signal: ``kill`` for SIGKILL, ``stop`` for SIGSTOP.
        prints_phases : bool
            Whether the process prints a line when a phase begins.
        in_background : bool
            Whether the process migrates all files to the tiers of their pins, like ``gdrkit tiers run``, until it is
            killed. `name` and `tier_name` are then not used.
        """
        tiers = [(tier.name, str(tier.directory), tier.accesses_min) for tier in configuration.tiers]
        task: dict[str, object] = {
            "tiers": tiers,
            "catalogue": str(configuration.catalogue),
            "name": name,
            "to": tier_name,
        }
        task |= {
            "phase": phase,
            "phase_begin_count": phase_begin_count,
            "signal_name": signal_name,
            "prints_phases": prints_phases,
        }
        task["in_background"] = in_background
        self.write_line(json.dumps(task))
        self._migration_process_id = int(self.read_line().removeprefix("pid "))
        return self._migration_process_id

    def wait_for_exit_code(self) -> int:
        """Wait for the end of the migration, and return its exit code, or the negative number of its signal.

        The exit code is 1 if the file was busy.
        """
        while not (line := self.read_line()).startswith("ended "):
            pass
        self._migration_process_id = 0
        return int(line.removeprefix("ended "))

    def __exit__(self, *_: object) -> None:
        if self._migration_process_id:
            # The case failed during the migration. SIGKILL ends a process even if SIGSTOP has stopped it.
            os.kill(self._migration_process_id, signal.SIGKILL)
        self.end()


class TierCampaign(KillCampaign[str]):
    """A kill campaign with five files in three tiers.

    Parameters
    ----------
    configuration : Configuration
        Empty tiers with the names :data:`TIER_NAMES`.
    migration_process : MigrationProcess
        The process that starts the migrations.
    seed : int
        Seed of all random decisions.
    in_background : bool
        Whether the killed process is a background run, which migrates several files by their pins.

    Attributes
    ----------
    timely_outside_kill_count : int
        Number of kills from outside that reached a migration before it completed.
    """

    def __init__(
        self,
        configuration: Configuration,
        migration_process: MigrationProcess,
        *,
        seed: int,
        in_background: bool = False,
    ) -> None:
        super().__init__(PHASES, random.Random(seed))
        self._in_background = in_background
        self.configuration = configuration
        self._migration_process = migration_process
        self.timely_outside_kill_count = 0
        self._data_by_name: dict[str, bytes] = {}
        lengths_bytes = {"empty": 0, "small": 17, "folder/page": 4 * KIB, "folder/odd": 100_003, "large": _LARGE_BYTES}
        with TierManager(configuration) as manager:
            for index, (name, length_bytes) in enumerate(lengths_bytes.items()):
                tier = self._rng.choice(TIER_NAMES)
                self._data_by_name[name] = create_file(manager, name, length_bytes, seed=seed + index, tier=tier)

    def kill(self, phase: str) -> None:
        """Kill a migration in this phase, open the tiers again, and check all files."""
        name = "large" if phase in {*_REPEATED_PHASES, ANYWHERE} else self._rng.choice(sorted(self._data_by_name))
        with TierManager(self.configuration) as manager:
            old_tier = manager.find(name).tier
            new_tier = self._rng.choice([tier for tier in TIER_NAMES if tier != old_tier])
            if self._in_background:
                for pinned_name in self._data_by_name:
                    manager.pin(pinned_name, new_tier if pinned_name == name else self._rng.choice(TIER_NAMES))
        try:
            if phase == ANYWHERE:
                self._kill_from_outside(name, new_tier)
            else:
                self._kill_in_phase(name, new_tier, phase)
            if self._rng.random() < 0.25:
                # Without a catalogue, the next manager rebuilds it from the tiers.
                shutil.rmtree(self.configuration.catalogue)
            check_tiers(self.configuration, self._data_by_name)
            self._change_random_file()
        except AssertionError as error:
            error.add_note(f"{name}: {old_tier} -> {new_tier}")
            raise

    def _kill_in_phase(self, name: str, new_tier: str, phase: str) -> None:
        phase_begin_count = self._rng.randint(1, 3) if phase in _REPEATED_PHASES else 1
        self._migration_process.start(
            self.configuration,
            name,
            new_tier,
            phase=phase,
            phase_begin_count=phase_begin_count,
            in_background=self._in_background,
        )
        assert self._migration_process.wait_for_exit_code() == -signal.SIGKILL, (
            f"the migration was not killed in {phase}"
        )

    def _kill_from_outside(self, name: str, new_tier: str) -> None:
        """Kill the migration after it reported a random number of phases. The kill may come in a later phase."""
        process_id = self._migration_process.start(
            self.configuration, name, new_tier, prints_phases=True, in_background=self._in_background
        )
        for _ in range(self._rng.randint(1, len(PHASES))):
            assert not self._migration_process.read_line().startswith("ended")
        # On a busy machine, the migration may already have ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        self.timely_outside_kill_count += self._migration_process.wait_for_exit_code() == -signal.SIGKILL

    def _change_random_file(self) -> None:
        """Write to a random file. So a later check detects if a migration restores old contents of a file."""
        name = self._rng.choice(sorted(set(self._data_by_name) - {"empty"}))
        data = bytearray(self._data_by_name[name])
        write_offset = self._rng.randrange(len(data))
        new_data = pattern.payload(min(64 * KIB, len(data) - write_offset), seed=self._rng.randrange(1 << 32))
        with TierManager(self.configuration) as manager, manager.open(name, "r+") as file:
            os.pwrite(file.fileno(), new_data, write_offset)
        data[write_offset : write_offset + len(new_data)] = new_data
        self._data_by_name[name] = bytes(data)


def _migrate(task: dict[str, Any]) -> None:
    """Execute a task of :meth:`MigrationProcess.start`, in the forked child."""
    tiers = tuple(Tier(name, Path(directory), accesses_min) for name, directory, accesses_min in task["tiers"])
    begin_count = 0

    def observe(phase: Phase, _name: str, offset_bytes: int) -> None:
        nonlocal begin_count
        if task["prints_phases"]:
            os.write(1, f"{phase.value} {offset_bytes}\n".encode())
        if phase.value == task["phase"]:
            begin_count += 1
            if begin_count == task["phase_begin_count"]:
                os.kill(os.getpid(), _SIGNALS[task["signal_name"]])

    # The rate limit makes the copy of the large file take a tenth of a second.
    settings = RunSettings(interval_s=0.01, rate_bytes_per_s=_RATE_BYTES_PER_S, watch="never")
    configuration = Configuration(tiers=tiers, catalogue=Path(task["catalogue"]), timeout_ms=20_000, run=settings)
    with TierManager(configuration) as manager:
        if task["in_background"]:
            with Path(os.devnull).open("w") as null_file:
                output = RunOutput(null_file, as_json=True)
                BackgroundRun(manager, stop=threading.Event(), output=output, observe=observe).run()
        else:
            manager.move(task["name"], task["to"], observe=observe)


def main() -> None:
    """Execute a migration for each line of standard input.

    The line ``pid N`` reports the process id of the migration, and the line ``ended CODE`` its end.
    """
    for line in sys.stdin:
        child_pid = os.fork()
        if child_pid == 0:
            os.write(1, f"pid {os.getpid()}\n".encode())
            try:
                _migrate(json.loads(line))
            except ApiError as error:
                os._exit(_BUSY_EXIT_CODE if error.reason is Reason.BUSY else _FAILED_EXIT_CODE)
            os._exit(0)
        os.write(1, f"ended {os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1])}\n".encode())


if __name__ == "__main__":
    main()
