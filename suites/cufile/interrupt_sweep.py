"""A program that interrupts cufile.probe() at every point, for test_probe.py.

A point is a place in the code where CPython may run a signal handler (see support/interrupts.py).
``python -m cufile.interrupt_sweep`` prints ``N points``, the number of points, if no interrupt left a child process.
Otherwise, it prints the point at which the interrupt left a child process. The timeout of the probe is so short that
the probe kills its child. Some of the interrupts therefore hit the code that kills the child.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

from support.interrupts import Interrupter

import gdrkit
from gdrkit import cufile
from gdrkit.errors import SetupMissing

__all__ = ["main"]

_PROBE_TIMEOUT_S = 0.01


def _has_children() -> bool:
    """Return whether this process has a child that is running, or that has ended and was not reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _interrupt_each_point() -> str:
    """Call the probe with an interrupt at each point in turn, and return the line to print."""
    for point_number in itertools.count(1):
        interrupter = Interrupter(point_number, str(Path(gdrkit.__file__).parent), subprocess.__file__)
        with contextlib.suppress(SetupMissing):
            interrupter.call(lambda: cufile.probe(timeout_s=_PROBE_TIMEOUT_S))
        if _has_children():
            return f"point {point_number}, {interrupter.interrupted_at}: the child was left behind"
        if not interrupter.interrupted_at:
            return f"{point_number - 1} points"
    raise AssertionError


def main() -> None:
    """Run the sweep."""
    sys.unraisablehook = lambda _: None  # Python reports an interrupt in a finalizer to this hook, and continues.
    sys.stdout.write(f"{_interrupt_each_point()}\n")


if __name__ == "__main__":
    main()
