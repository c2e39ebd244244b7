"""Conversion of SIGTERM and SIGHUP into exceptions, so that an interrupted qualification also ends its children.

By default, Python raises an exception for SIGINT only.
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

__all__ = ["exit_on_signals", "interruptible_children"]


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit, with the exit code that a shell reports for the signal.

    A signal that is ignored (nohup) or that has a handler keeps its disposition. In any thread but the main thread the
    context manager has no effect, because only the main thread handles signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    changed = [each for each in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(each) is signal.SIG_DFL]
    for each in changed:
        signal.signal(each, _end)
    try:
        yield
    finally:
        for each in changed:
            signal.signal(each, signal.SIG_DFL)


@contextlib.contextmanager
def interruptible_children() -> Iterator[None]:
    """Start child processes with the default action of SIGINT, even if this process ignores it.

    A shell ignores SIGINT for background processes, and children inherit an ignored signal. A signal with a handler,
    however, is reset to its default in a child. So SIGINT gets an empty handler here while the children start. In any
    thread but the main thread the context manager has no effect.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, _do_nothing)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python calls handlers with a frame.
    sys.exit(128 + number)
