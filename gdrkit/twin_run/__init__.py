"""``gdrkit run``: start a command on software twins, wait for it, and report which twins it used.

:func:`run_on_twins` is the whole command. The other modules have one part each: the state of a domain (`domain_state`),
the start of the command and its signals (`supervisor`), the record that the twins write (`usage`), and the libraries
that the processes have mapped (`loaded`).
"""

from __future__ import annotations

from gdrkit.twin_run.command import run_on_twins

__all__ = ["run_on_twins"]
