"""The quick check of a node (`gdrkit check`): one test, one line of output, and an exit code within a given time.

The command is for the prolog of a workload manager and for the probe of a container. It executes the steps of ``gdrkit
qualify`` for a single test, without the report. The test moves bytes between every GPU and every NIC, in one case per
registration route (dma-buf or peer memory).
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gdrkit.children import KILL_TIMEOUT_S
from gdrkit.exit_code import ExitCode
from gdrkit.host import HostTree, host_identity
from gdrkit.install_paths import install_paths
from gdrkit.qualify.interrupt import exit_on_signals
from gdrkit.qualify.run import Options, run_cases
from gdrkit.text import format_count, single_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from gdrkit.qualify.plan import CasePlan
    from gdrkit.report import Record, Run

__all__ = ["CheckResult", "check"]

_RESULT_TEXT_BY_EXIT_CODE: dict[int, str] = {
    ExitCode.PROVEN: "ok",
    ExitCode.FAILED: "failed",
    ExitCode.SETUP_MISSING: "set-up is missing",
    ExitCode.NOTHING_PROVEN: "nothing proven",
}
_TEST_NAME = "test_every_nic_accesses_every_device"
# The share of the time budget that each query of an API (CUDA, verbs, NVML) may take. The queries run concurrently.
_QUERY_BUDGET_SHARE = 0.4
# Time for the clean-up of the running case before its process is killed, in seconds.
_CLEAN_UP_TIMEOUT_S = 0.5
# The part of the time budget that is kept for ending the child process, in seconds.
_END_RESERVE_S = KILL_TIMEOUT_S + _CLEAN_UP_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The exit code of a check, and the line that the command prints."""

    code: ExitCode
    line: str


class _TimeLimitReached(BaseException):
    """Raised when the time budget has passed. It is not an Exception, so that no ``except Exception`` catches it."""


class _CurrentStep:
    """A :class:`gdrkit.qualify.run.Progress` that prints nothing, and keeps a text about the current step."""

    def __init__(self) -> None:
        self.text = "querying CUDA, verbs and NVML"

    def print_line(self, line: str) -> None:
        """Do nothing: the check prints one line at its end."""

    def begin_cases(self, plan: CasePlan) -> None:
        """Set the text to the number of cases of `plan`, which now start to run."""
        self.text = f"running {format_count(len(plan.cases), 'case')} of the routes"

    def show_record(self, record: Record) -> None:
        """Set the text to the name of the case that has ended."""
        self.text = f"running the case after {record.case.rpartition('::')[2]}"

    def close(self) -> None:
        """Do nothing: there is no display to end."""


def check(options: Options, *, budget_s: float) -> CheckResult:
    """Check the routes between GPUs and NICs of this machine within `budget_s` seconds.

    Parameters
    ----------
    options : Options
        ``uses_only_twins``, ``profile`` and ``command`` are used. This function sets the other options itself.
    budget_s : float
        Limit of the duration of the check, which holds even if a driver hangs. At least 10 s.

    Raises
    ------
    SetupMissing
        pytest or the software twins (libraries that emulate the hardware) are not installed.
    UsageError
        The profile does not exist or does not fit this machine.
    """
    started_s = time.monotonic()
    host_name, current_step = host_identity(HostTree()).name or "this host", _CurrentStep()
    with tempfile.TemporaryDirectory(prefix="gdrkit-check-", ignore_cleanup_errors=True) as folder:
        check_options = replace(
            options,
            output=Path(folder),
            suites=install_paths().suites / "rdma",
            select=_TEST_NAME,
            query_timeout_s=budget_s * _QUERY_BUDGET_SHARE,
            clean_up_timeout_s=_CLEAN_UP_TIMEOUT_S,
        )
        try:
            with exit_on_signals(), _limit_time(budget_s - _END_RESERVE_S):
                run, _ = run_cases(check_options, current_step)
        except _TimeLimitReached:
            line = (
                f"{host_name}: failed: no result within {budget_s:g} s, while {current_step.text}. To do: gdrkit doctor"
            )
            return CheckResult(ExitCode.FAILED, line)
    return CheckResult(ExitCode(run.exit_code), _describe_result(host_name, run, time.monotonic() - started_s))


def _describe_result(host_name: str, run: Run, duration_s: float) -> str:
    """Return the line to print: host, result, first cause, what to do, and duration."""
    result_text = (
        "software only"
        if run.exit_code == ExitCode.PROVEN and run.software_asked
        else _RESULT_TEXT_BY_EXIT_CODE[run.exit_code]
    )
    line_parts = [host_name, result_text]
    if run.exit_code != ExitCode.NOTHING_PROVEN or not run.causes:
        line_parts.append(run.verdict)
    if run.causes:
        more_causes_text = f" (and {len(run.causes) - 1} more)" if len(run.causes) > 1 else ""
        line_parts.append(run.causes[0] + more_causes_text)
    line = ": ".join(line_parts)
    if run.exit_code != ExitCode.PROVEN and "To do: " not in line:
        line += f". To do: {run.to_do[0] if run.to_do else 'gdrkit doctor'}"
    return single_line(f"{line} [{duration_s:.0f} s]")


@contextlib.contextmanager
def _limit_time(limit_s: float) -> Iterator[None]:
    """Raise :class:`_TimeLimitReached` in the main thread after `limit_s` seconds."""

    def raise_time_limit_reached(_signal_number: int, _frame: FrameType | None) -> NoReturn:
        raise _TimeLimitReached

    previous_handler = signal.signal(signal.SIGALRM, raise_time_limit_reached)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
