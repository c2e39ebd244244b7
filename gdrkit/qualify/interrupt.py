"""The signals that end a qualification become exceptions, so that what it has started ends with it.

Level 6. Python makes one of SIGINT alone.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["ended_by_signals", "interruptible_children"]


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise SystemExit, with the exit code that a shell has for them.

    One that is ignored (nohup) or that somebody else handles stays as it is, and in another thread than the main one,
    which gets no signals, all do.
    """
    is_main = threading.current_thread() is threading.main_thread()
    taken = [each for each in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        signal.signal(each, _end)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


@contextlib.contextmanager
def interruptible_children() -> Iterator[None]:
    """Have what is started meanwhile hear SIGINT, also where it is ignored here.

    A shell ignores it for what it runs in the background, and children inherit that; one that is handled here ends
    them. In another thread than the main one nothing changes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, _pass_by)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _pass_by(number: int, frame: FrameType | None) -> None:
    pass


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as Python calls it.
    sys.exit(128 + number)
