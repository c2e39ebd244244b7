"""Supervision of a command: this process starts the command, forwards signals to it, and ends as the command ended.

The command is in the process group of this process and has its standard streams. So the terminal sends its signals
(Ctrl-C, Ctrl-Z, window size) to both, and this process does not forward them. It forwards signals that other processes
send to it. If this process is killed, the kernel kills the command.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from gdrkit.errors import Api, ApiError, Reason, errno_name
from gdrkit.host import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["block_signals", "exit_like", "supervise"]

# SIGKILL and SIGSTOP cannot be blocked.
_BLOCKED_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
# si_code of a signal that the kernel sends, such as the signals of the terminal (asm-generic/siginfo.h).
_SI_KERNEL = 0x80
# If one of these signals stops the command, the terminal has stopped the whole job, of which this process is a part.
_TERMINAL_STOP_SIGNALS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_OBSERVE_FIRST_INTERVAL_S, _OBSERVE_INTERVAL_S_MAX = 0.02, 2.0
_EXEC_FAILED_EXIT_CODE = 127


def block_signals() -> set[signal.Signals | int]:
    """Block all signals in this thread and in the threads that it creates later. Return the previous mask.

    The kernel may give a signal of the process to any thread that does not block it. In a thread with the old mask,
    SIGCHLD would be discarded and SIGTERM would end this process. Then :func:`supervise` would not receive the signal.
    """
    return set(signal.pthread_sigmask(signal.SIG_SETMASK, _BLOCKED_SIGNALS))


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    observe: Callable[[int], None],
    *,
    signal_mask: set[signal.Signals | int] | None = None,
    interval_s_max: float = _OBSERVE_INTERVAL_S_MAX,
) -> int:
    """Run a command and return its wait status, as os.waitpid does. All signals stay blocked in this thread.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments.
    environment : mapping
        The environment of the command.
    observe : callable
        Called with the process ID of the command while it runs: first after 20 ms, then at intervals that double up to
        `interval_s_max`, and once when a child has ended, before this process reads its status.
    signal_mask : set of Signals, optional
        The signal mask of the command. A process with threads calls :func:`block_signals` before it creates them, and
        passes the mask that :func:`block_signals` returned. None: the command gets the current mask of this thread.
    interval_s_max : float
        The longest interval between two calls of `observe`, in seconds.

    Raises
    ------
    ApiError
        The command cannot be started: ENOENT (not found), EACCES (not executable) or another errno of execvp(3).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    command_mask = block_signals() if signal_mask is None else signal_mask
    # If execvp fails, the child writes the errno into this pipe. If execvp succeeds, the pipe is closed, and read()
    # returns no bytes.
    error_reader, error_writer = os.pipe2(os.O_CLOEXEC)
    parent_id = os.getpid()
    child_id = os.fork()
    if child_id == 0:
        _execute(command, environment, parent_id, command_mask, error_writer)
    os.close(error_writer)
    with os.fdopen(error_reader, "rb") as reader:
        errno_text = reader.read()
    if errno_text:
        os.waitpid(child_id, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, command_mask)
        error_number = int(errno_text)
        raise ApiError(
            api=Api.KERNEL,
            operation="execvp",
            status=error_number,
            status_name=errno_name(error_number),
            errno=error_number,
            arguments={"command": command[0]},
            reason=Reason.NO_PERMISSION if error_number == errno.EACCES else Reason.BAD_ARGUMENT,
            what_to_do="check the name of the command" if error_number == errno.ENOENT else "make the file executable",
        )
    return _wait_and_observe(child_id, observe, interval_s_max)


def _execute(
    command: Sequence[str],
    environment: Mapping[str, str],
    parent_id: int,
    command_mask: set[signal.Signals | int],
    error_descriptor: int,
) -> NoReturn:
    """Replace the new child process by the command. If that fails, write the errno to `error_descriptor`."""
    try:
        die_with_parent(parent_id)
        # Python ignores these signals. Programs expect the default actions.
        for signal_number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signal_number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, command_mask)
        os.execvpe(command[0], list(command), environment)  # noqa: S606 - no shell is involved.
    except OSError as error:
        os.write(error_descriptor, str(error.errno).encode())
    finally:
        os._exit(_EXEC_FAILED_EXIT_CODE)


def _wait_and_observe(child_id: int, observe: Callable[[int], None], interval_s_max: float) -> int:
    """Wait for the end of the command, forward signals to it meanwhile, and return its wait status."""
    interval_s = _OBSERVE_FIRST_INTERVAL_S
    next_observation_s = time.monotonic() + interval_s
    while True:
        signal_info = signal.sigtimedwait(_BLOCKED_SIGNALS, max(0.0, next_observation_s - time.monotonic()))
        if signal_info is None or signal_info.si_signo == signal.SIGCHLD:
            observe(child_id)
            # The status is polled even without SIGCHLD, because a thread of a library may have taken the signal.
            if (wait_status := _poll_wait_status(child_id)) is not None:
                return wait_status
            if signal_info is None:
                interval_s = min(2 * interval_s, interval_s_max)
                next_observation_s = time.monotonic() + interval_s
        elif signal_info.si_code != _SI_KERNEL:  # The terminal sends its signals to the command too.
            # The command may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child_id, signal_info.si_signo)


def _poll_wait_status(child_id: int) -> int | None:
    """Return the wait status of the command if it has ended. If the terminal stopped it, stop this process too."""
    while True:
        process_id, wait_status = os.waitpid(child_id, os.WNOHANG | os.WUNTRACED)
        if process_id == 0:
            return None
        if not os.WIFSTOPPED(wait_status):
            return wait_status
        if os.WSTOPSIG(wait_status) in _TERMINAL_STOP_SIGNALS:
            os.kill(os.getpid(), signal.SIGSTOP)


def exit_like(wait_status: int) -> NoReturn:
    """End this process as the process with this wait status ended: with its exit code, or by its signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.WIFSIGNALED(wait_status):
        # This process must not overwrite the core file of the command.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        signal_number = os.WTERMSIG(wait_status)
        if signal_number != signal.SIGKILL:
            signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)
        # The signal was blocked, so it is pending. It ends this process as soon as all signals are unblocked.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os._exit(os.waitstatus_to_exitcode(wait_status))
