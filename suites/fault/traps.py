"""Traps that stop a process in a named call of a software twin, for the kill campaign.

A trap is a rule ``stop=PATH`` of the fault plan of the twins. If the file PATH exists, the trap is armed: the next
process that makes the call renames PATH to PATH.PID and stops itself with SIGSTOP. A software twin is a library that
emulates the hardware below an API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.processes import WAIT_S, is_stopped, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Traps"]


class Traps:
    """A fault plan with traps, and the files that arm them.

    Parameters
    ----------
    folder : Path
        Folder that the constructor creates for the fault plan and the files of the traps.
    trap_by_call : Mapping of str to str
        Name of the trap for each call of the plan.

    Attributes
    ----------
    plan_path : Path
        Path of the fault plan, for the environment variable GDRKIT_TWINS_FAULTS.
    """

    def __init__(self, folder: Path, trap_by_call: Mapping[str, str]) -> None:
        self._folder = folder
        folder.mkdir()
        self.plan_path = folder / "plan"
        rules = [f"{call} call=* stop={folder / trap}" for call, trap in trap_by_call.items()]
        self.plan_path.write_text("\n".join(["gdrkit-faults 1", *rules, ""]))

    def arm(self, trap: str) -> None:
        """Arm the trap: it stops the next process that makes one of its calls."""
        (self._folder / trap).touch()

    def disarm(self, trap: str) -> bool:
        """Disarm the trap. Return False if a process has already renamed the file and therefore stops."""
        try:
            (self._folder / trap).unlink()
        except FileNotFoundError:
            return False
        return True

    def has_caught(self, trap: str, process_id: int) -> bool:
        """Return whether the trap has stopped this process. It must not have stopped another process."""
        renamed_files = list(self._folder.glob(f"{trap}.*"))
        assert all(file.suffix == f".{process_id}" for file in renamed_files), (
            f"the trap {trap} stopped a process other than {process_id}: {renamed_files}"
        )
        return bool(renamed_files) and is_stopped(process_id)

    def wait_for(self, trap: str, process_id: int, *, timeout_s: float = WAIT_S) -> None:
        """Wait until the trap has stopped this process, and remove the file of the trap."""
        wait_until(
            lambda: self.has_caught(trap, process_id), f"process {process_id} in trap {trap}", timeout_s=timeout_s
        )
        (self._folder / f"{trap}.{process_id}").unlink()
