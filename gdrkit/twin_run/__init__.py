"""``gdrkit run``: start a command on software twins, wait for it, and report which twins it used.

A software twin is a drop-in library that emulates the hardware below an API. A domain is a set of processes whose twins
behave like the devices of one machine.

:func:`run_on_twins` is the whole command. The other modules have one part each: the state of a domain (`domain_state`),
the start of the command and its signals (`supervisor`), the counts that the twins write (`usage`), the libraries
that the processes have mapped (`loaded`), and the lines of the report (`report`).
"""

from __future__ import annotations

from gdrkit.twin_run.command import run_on_twins
from gdrkit.twin_run.supervisor import block_signals, exit_like, supervise
from gdrkit.twin_run.usage import ProcessUse, read_usage, twin_dmabufs

__all__ = ["ProcessUse", "block_signals", "exit_like", "read_usage", "run_on_twins", "supervise", "twin_dmabufs"]
