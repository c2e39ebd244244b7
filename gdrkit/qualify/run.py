"""The steps of ``gdrkit qualify``: check the installation, probe the machine, run the cases, and write the report."""

from __future__ import annotations

import datetime as dt
import importlib.util
import json
import secrets
import shlex
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import gdrkit
from gdrkit import launch
from gdrkit.errors import Api, Reason, SetupMissing
from gdrkit.exit_code import ExitCode
from gdrkit.host import HostTree, host_identity
from gdrkit.install_paths import install_paths
from gdrkit.inventory import Facts, diagnose, load_profile, probe, this_machine, topology
from gdrkit.qualify.child import CommonRecordFields, SuiteRunner
from gdrkit.qualify.interrupt import exit_on_signals
from gdrkit.qualify.outcome import decide
from gdrkit.qualify.plan import CasePlan, list_nox_sessions
from gdrkit.remedies import pip_install
from gdrkit.report import Run, RunFolder, read_records
from gdrkit.report.render import render
from gdrkit.report.run import SCHEMA_VERSION, banner
from gdrkit.report.substrate import substrates_of_facts

if TYPE_CHECKING:
    from gdrkit.report import Record

__all__ = ["Options", "Progress", "plan_only", "qualify", "run_cases"]

_SEED_BITS = 63


class Progress(Protocol):
    """Interface of the objects that display the progress of a run; see :mod:`gdrkit.qualify.progress`."""

    def print_line(self, line: str) -> None:
        """Print a line about the run as a whole."""

    def begin_cases(self, plan: CasePlan) -> None:
        """Start the display of the cases of `plan`."""

    def show_record(self, record: Record) -> None:
        """Show a case that has completed."""

    def close(self) -> None:
        """End the display."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``gdrkit qualify``.

    Attributes
    ----------
    uses_only_twins : bool
        Whether to run every API on its software twin (a library that emulates the hardware), even if the hardware is
        present.
    profile : str or None
        Name of the profile. None for the profile that fits the machine best.
    output : Path or None
        The folder of the report. None for a new subfolder of the default folder.
    seed : int or None
        Seed of the run. None for a random seed.
    select : str or None
        The expression of pytest's ``-k``.
    suites : Path or None
        The folder of the cases. None for the suites of gdrkit.
    command : str
        The command line that the records contain.
    query_timeout_s : float
        Time limit of each query of an API, in seconds.
    clean_up_timeout_s : float
        Time for the clean-up of the running case if the run is interrupted, in seconds.
    """

    uses_only_twins: bool = False
    profile: str | None = None
    output: Path | None = None
    seed: int | None = None
    select: str | None = None
    suites: Path | None = None
    command: str = "gdrkit qualify"
    query_timeout_s: float = 60.0
    clean_up_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class _PreparedRun:
    """The results of the steps that precede the collection of the cases. `substrates` has the substrate of each API."""

    folder: RunFolder
    facts: Facts
    substrates: dict[str, str]
    seed: int
    runner: SuiteRunner


def qualify(options: Options, progress: Progress) -> tuple[Run, RunFolder]:
    """Qualify this machine, and return the run and its folder.

    Raises
    ------
    SetupMissing
        pytest, the suites or the twins are not installed.
    UsageError
        The profile does not exist or does not fit this machine, or the selection or the seed is invalid.
    """
    with exit_on_signals():
        run, folder = run_cases(options, progress)
        render(folder.path)
        return run, folder


def plan_only(options: Options, progress: Progress) -> dict[str, object]:
    """Return the plan of a run and, for each nox session, whether it can run on this machine. Run no case.

    Without an output folder in `options`, the files of the plan are written to a temporary folder.
    """
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="gdrkit-plan-") as folder:
        options_with_output = replace(options, output=options.output or Path(folder))
        prepared_run = _prepare_run(options_with_output, progress, dt.datetime.now(dt.UTC))
        plan = prepared_run.runner.plan()
        plan_data = json.loads(prepared_run.folder.plan.read_bytes())
    hardware = launch.present_hardware(HostTree())
    return {
        "profile": plan.profile,
        "substrate": prepared_run.substrates,
        "hardware": {api.value: text for api, text in hardware.items()},
        "sessions": list_nox_sessions(hardware, launch.twins_available()),
        "cases": plan_data["cases"],
    }


def run_cases(options: Options, progress: Progress) -> tuple[Run, RunFolder]:
    """Do the steps of :func:`qualify` except the report: run the cases, write run.json, and return run and folder."""
    start_time, clock_start_s = dt.datetime.now(dt.UTC), time.monotonic()
    prepared_run = _prepare_run(options, progress, start_time)
    commit, identity = install_paths().commit(), host_identity(HostTree())
    common_fields = CommonRecordFields(
        facts_digest=prepared_run.facts.digest,
        seed=prepared_run.seed,
        commit=commit,
        version=gdrkit.__version__,
        command=options.command,
    )
    unfinished_run = Run(
        schema_version=SCHEMA_VERSION,
        started=start_time.strftime("%Y-%m-%dT%H:%M:%SZ"),
        duration_s=0.0,
        command=options.command,
        profile=options.profile or "any",
        profile_about="",
        substrate=prepared_run.substrates,
        software_asked=options.uses_only_twins,
        seed=prepared_run.seed,
        commit=commit,
        version=gdrkit.__version__,
        exit_code=int(ExitCode.FAILED),
        verdict="The run did not end",
        causes=("its process ended before all cases had completed",),
        to_do=("run it again",),
        required=(),
        host=identity.name,
        host_id=identity.digest,
        is_interrupted=True,
        selection=_describe_selection(options),
    )
    # run.json says "interrupted" until the finished run replaces it. So `gdrkit report` can report the completed cases
    # even if this process is killed.
    prepared_run.folder.write_run(unfinished_run)
    try:
        plan = prepared_run.runner.run(common_fields, progress.begin_cases, progress.show_record)
    except (KeyboardInterrupt, SystemExit):
        path = shlex.quote(str(prepared_run.folder.path))
        progress.print_line(f"The run was interrupted. To report the completed cases, run: gdrkit report {path}")
        raise
    finally:
        progress.close()
        for line in prepared_run.runner.kill_failures:
            progress.print_line(line)
    profile = load_profile(plan.profile)
    records = read_records(prepared_run.folder.records) if prepared_run.folder.records.exists() else ()
    outcome = decide(
        prepared_run.facts,
        profile,
        records,
        uses_only_twins=options.uses_only_twins,
        is_part=bool(unfinished_run.selection),
    )
    run = replace(
        unfinished_run,
        duration_s=round(time.monotonic() - clock_start_s, 3),
        profile=profile.name,
        profile_about=profile.about,
        exit_code=int(outcome.code),
        verdict=outcome.verdict,
        causes=outcome.causes,
        to_do=outcome.to_do,
        required=outcome.required,
        is_interrupted=False,
    )
    prepared_run.folder.write_run(run)
    return run, prepared_run.folder


def _describe_selection(options: Options) -> str:
    """Return the options that select a part of the cases, quoted for a shell."""
    value_by_option = {"-k": options.select, "--suites": options.suites}
    return shlex.join(
        word for name, value in value_by_option.items() if value is not None for word in (name, str(value))
    )


def _prepare_run(options: Options, progress: Progress, start_time: dt.datetime) -> _PreparedRun:
    _check_installation()
    tree = HostTree()
    present_hardware = launch.present_hardware(tree)
    twin_apis = launch.APIS_WITH_TWINS if options.uses_only_twins else launch.APIS_WITH_TWINS - present_hardware.keys()
    seed = secrets.randbits(_SEED_BITS) if options.seed is None else options.seed
    launch_options = launch.Launch(twin_apis=twin_apis, seed=seed, isolated=True)
    environment = launch.environment(launch_options)
    if options.profile is not None:
        load_profile(options.profile)  # Raise the error for an unknown name now, because the probe below is slow.
    folder = RunFolder(options.output or install_paths().runs / start_time.strftime("%Y%m%dT%H%M%SZ"))
    folder.make_empty()
    facts = probe(environment=environment, timeout_s=options.query_timeout_s)
    folder.facts.write_text(facts.to_json(), encoding="utf-8")
    machine = this_machine(facts=facts, run_experiments=False)
    folder.topology.write_text(topology(machine).to_json(), encoding="utf-8")
    folder.diagnosis.write_text(diagnose(machine).to_json(), encoding="utf-8")
    substrates = {api: substrate.value for api, substrate in substrates_of_facts(facts).items()}
    for line in (banner(substrates), launch.describe_hardware_replaced_by_twins(launch_options, tree)):
        if line:
            progress.print_line(line)
    pytest_options = [f"--seed={seed}", f"--command={options.command}"]
    if options.profile is not None:
        pytest_options.append(f"--profile={options.profile}")
    if options.select is not None:
        pytest_options += ["-k", options.select]
    runner = SuiteRunner(
        folder, environment, pytest_options, suites=options.suites, clean_up_timeout_s=options.clean_up_timeout_s
    )
    return _PreparedRun(folder, facts, substrates, seed, runner)


def _check_installation() -> None:
    """Raise SetupMissing if pytest or the suites are not installed."""
    if importlib.util.find_spec("pytest") is None:
        operation, what_to_do = "import pytest", pip_install("qualify")
        raise _make_not_installed_error(operation, what_to_do)
    if not (install_paths().suites / "pytest.ini").is_file():
        operation, what_to_do = "find the suites", "install gdrkit from a wheel or run it from a checkout"
        raise _make_not_installed_error(operation, what_to_do)


def _make_not_installed_error(operation: str, what_to_do: str) -> SetupMissing:
    return SetupMissing(
        api=Api.NONE,
        operation=operation,
        status=None,
        status_name="not installed",
        reason=Reason.LIBRARY_MISSING,
        what_to_do=what_to_do,
    )
