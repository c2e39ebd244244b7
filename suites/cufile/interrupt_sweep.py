"""A program that interrupts cufile.probe() at every point, for test_probe.py.

``python -m cufile.interrupt_sweep`` prints ``POINTS points`` if no interrupt left a child process. Otherwise it prints
the point of the interrupt that left one. The probe has a short timeout, so that it kills its child. The interrupts also
hit this kill.
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

_TIMEOUT_S = 0.01


def _has_children() -> bool:
    """Return whether this process has a child that is running, or that has ended and was not reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _sweep() -> str:
    for point in itertools.count(1):
        interrupter = Interrupter(point, str(Path(gdrkit.__file__).parent), subprocess.__file__)
        with contextlib.suppress(SetupMissing):
            interrupter.call(lambda: cufile.probe(timeout_s=_TIMEOUT_S))
        if _has_children():
            return f"point {point}, {interrupter.interrupted_at}: the child was left behind"
        if not interrupter.interrupted_at:
            return f"{point - 1} points"
    raise AssertionError


def main() -> None:
    """Run the sweep."""
    sys.unraisablehook = lambda _: None  # An interrupt in a finalizer is lost, as any exception there.
    sys.stdout.write(f"{_sweep()}\n")


if __name__ == "__main__":
    main()
