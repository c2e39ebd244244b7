"""The command ``gdrkit run``: runs a command on software twins and reports which twins its processes used.

Software twins are libraries that emulate the hardware below an API.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from typing import TYPE_CHECKING, NoReturn

from gdrkit import launch
from gdrkit.errors import Api, UsageError
from gdrkit.text import escape_controls
from gdrkit.twin_run.domain_state import enter_domain, write_devices
from gdrkit.twin_run.loaded import LoadedLibraries
from gdrkit.twin_run.report import list_used_apis, report_document, report_lines
from gdrkit.twin_run.supervisor import exit_like, supervise
from gdrkit.twin_run.usage import create_usage_file, read_runtimes, read_usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["EXIT_NOT_USED", "run_on_twins"]

# The exit code of ``gdrkit run`` if the command ended with 0 but did not use a required API. The codes from 126 on have
# a meaning in shells, so this is the largest free code.
EXIT_NOT_USED = 125


def run_on_twins(
    options: launch.Launch,
    command: Sequence[str],
    *,
    required: frozenset[Api] = frozenset(),
    quiet: bool = False,
    report_file: Path | None = None,
) -> NoReturn:
    """Run a command on twins, print the report, and end this process as the command ended.

    Parameters
    ----------
    options : Launch
        The APIs that run on twins, and the options of the twins.
    command : sequence of str
        The program and its arguments.
    required : frozenset of Api
        APIs that the command must use. If it ends with 0 but has not used all of them, the exit code is 125.
    quiet : bool
        Whether to omit the printed report.
    report_file : Path or None
        File to which the report is written as JSON, also if `quiet` is set.

    Raises
    ------
    ApiError
        The command cannot be started: ENOENT (not found), EACCES (not executable) or another errno of execvp.
    SetupMissing, UsageError
        See :func:`gdrkit.launch.environment`. UsageError: there is no command, or a required API does not run on a
        twin.
    """
    if not command:
        message = "no command was given"
        raise UsageError(
            message, what_to_do="write it after --, for example: gdrkit run --software -- python my_program.py"
        )
    if required - options.twin_apis:
        api_names = ", ".join(sorted(api.value for api in required - options.twin_apis))
        message = f"--require must name APIs that run on twins (--apis), not {api_names}"
        raise UsageError(message)
    environment = launch.environment(options)
    with _open_shared_state(options, environment) as state_folder:
        usage_file = None
        if state_folder is not None:
            usage_file = state_folder / f"run.{os.getpid()}.{secrets.token_hex(4)}"
            create_usage_file(usage_file)
            environment = launch.with_state(environment, options, state=state_folder, usage_file=usage_file)
        loaded_libraries = LoadedLibraries(options.twin_apis, str(usage_file))
        try:
            wait_status = supervise(command, environment, loaded_libraries.observe)
            process_uses = [] if usage_file is None else read_usage(usage_file)
            runtime_uses = [] if usage_file is None else read_runtimes(usage_file)
        finally:
            # Only the file is removed, because another run may still use the folder.
            if usage_file is not None:
                usage_file.unlink(missing_ok=True)
    real_libraries = sorted(loaded_libraries.real_libraries)
    lines = [] if quiet else report_lines(options.twin_apis, process_uses, real_libraries, runtime_uses)
    unused_apis = required - list_used_apis(process_uses)
    if unused_apis and wait_status == 0:
        api_names = ", ".join(sorted(api.value for api in unused_apis))
        lines.append(f"the command ended with 0, but it did not use {api_names}, which --require names")
        wait_status = EXIT_NOT_USED << 8  # The wait status of a process that exited with this code.
    if report_file is not None:
        exit_code = os.waitstatus_to_exitcode(wait_status)
        document = report_document(process_uses, real_libraries, runtime_uses, exit_code=exit_code)
        report_file.write_text(json.dumps(document, indent=2) + "\n")
    for line in lines:
        print(f"gdrkit: {escape_controls(line)}", file=sys.stderr)  # noqa: T201 - this is the output of the command.
    exit_like(wait_status)


@contextlib.contextmanager
def _open_shared_state(options: launch.Launch, environment: dict[str, str]) -> Iterator[Path | None]:
    """Create or join the state of the domain, with the device files of the verbs twin.

    Programs can run on the twins without this state. So a failure is only printed as one line, and None is yielded.
    """
    with contextlib.ExitStack() as stack:
        try:
            state_folder = stack.enter_context(enter_domain(environment))
        except OSError as error:
            _warn(
                f"no report and no device files in /sys and /dev, because the domain's state cannot be stored: {error}"
            )
            yield None
            return
        writer_program = launch.device_writer()
        if Api.VERBS in options.twin_apis and writer_program is not None:
            failure_text = write_devices(state_folder, writer_program, environment)
            if failure_text is not None:
                _warn(f"programs do not see the devices in /sys and /dev: {failure_text}")
        yield state_folder


def _warn(line: str) -> None:
    print(f"gdrkit: {escape_controls(line)}", file=sys.stderr)  # noqa: T201 - this is the output of the command.
