"""Conversion of signals that end a qualification into exceptions, so that its child processes end with it.

By default, Python does this for SIGINT only.
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
    """Make SIGTERM and SIGHUP raise SystemExit with the exit code that a shell gives them.

    A signal that is ignored (nohup) or that has another handler is not changed. In a thread other than the main thread
    nothing is changed, because only the main thread handles signals.
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
    """Let child processes that are started meanwhile receive SIGINT, even if this process ignores it.

    A shell ignores SIGINT for background processes, and children inherit that. A signal that has a handler here is
    reset to its default in children. In a thread other than the main thread nothing is changed.
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


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python calls handlers with a frame.
    sys.exit(128 + number)
