"""Handling of SIGTERM, SIGHUP and SIGINT during a qualification, so that a signal also ends its child processes.

By default, Python raises an exception for SIGINT only. The other signals would end this process without any clean-up.
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

    A signal that is ignored (nohup) or already has a handler is not changed. The context manager has an effect only in
    the main thread, because Python handles signals only there.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    handled_signals = (signal.SIGTERM, signal.SIGHUP) if is_main_thread else ()
    changed_signals = [number for number in handled_signals if signal.getsignal(number) is signal.SIG_DFL]
    for signal_number in changed_signals:
        signal.signal(signal_number, _exit_with_signal)
    try:
        yield
    finally:
        for signal_number in changed_signals:
            signal.signal(signal_number, signal.SIG_DFL)


@contextlib.contextmanager
def interruptible_children() -> Iterator[None]:
    """Let child processes that are started in this context react to SIGINT, even if this process ignores it.

    A shell may start a background process with SIGINT ignored, and its child processes inherit this. If SIGINT has a
    handler instead, exec resets it to the default action in the child. So if SIGINT is ignored, this context manager
    installs an empty handler. It has an effect only in the main thread.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, _do_nothing)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _do_nothing(signal_number: int, frame: FrameType | None) -> None:
    pass


def _exit_with_signal(signal_number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python passes a frame.
    sys.exit(128 + signal_number)
