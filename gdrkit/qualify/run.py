"""The steps of a qualification, from the probe to the report."""

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
from gdrkit.inventory import Facts, load_profile, probe
from gdrkit.qualify.child import Common, Suites
from gdrkit.qualify.interrupt import ended_by_signals
from gdrkit.qualify.outcome import decide
from gdrkit.qualify.plan import Plan, fitting_sessions
from gdrkit.report import Run, RunFolder, read_records
from gdrkit.report.render import render
from gdrkit.report.run import SCHEMA_VERSION, banner
from gdrkit.report.substrate import substrates_of_facts

if TYPE_CHECKING:
    from gdrkit.report import Record

__all__ = ["Options", "Progress", "plan_only", "qualify"]

_SEED_BITS = 63


class Progress(Protocol):
    """Receiver of the progress of a run."""

    def say(self, line: str) -> None:
        """Print a line about the run as a whole."""

    def begin(self, plan: Plan) -> None:
        """Start the display of the cases of `plan`."""

    def done(self, record: Record) -> None:
        """Report a case that has ended."""

    def end(self) -> None:
        """Report that no further case follows."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``gdrkit qualify``.

    Attributes
    ----------
    software : bool
        Run every API on its twin, whatever hardware is present.
    profile : str or None
        Name of the profile; the one that fits best if None.
    output : Path or None
        The folder of the report; a new one below the default folder if None.
    seed : int or None
        Seed of the run; a random one if None.
    select : str or None
        The expression of pytest's ``-k``.
    suites : Path or None
        The folder of the cases; gdrkit's own if None.
    command : str
        The command line, for the record.
    """

    software: bool = False
    profile: str | None = None
    output: Path | None = None
    seed: int | None = None
    select: str | None = None
    suites: Path | None = None
    command: str = "gdrkit qualify"


@dataclass(frozen=True, slots=True)
class _Prepared:
    folder: RunFolder
    facts: Facts
    substrate: dict[str, str]
    seed: int
    suites: Suites


def qualify(options: Options, progress: Progress) -> tuple[Run, RunFolder]:
    """Qualify this machine, and return the run and its folder.

    Raises
    ------
    SetupMissing
        pytest or the twins are not installed.
    UsageError
        The profile does not exist or does not fit, or the selection is invalid.
    """
    with ended_by_signals():
        return _qualify(options, progress)


def plan_only(options: Options, progress: Progress) -> dict[str, object]:
    """Return what would run, and which sessions fit. Nothing is kept unless an output folder is named."""
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="gdrkit-plan-") as folder:
        chosen = replace(options, output=options.output or Path(folder))
        prepared = _prepare(chosen, progress, dt.datetime.now(dt.UTC))
        plan = prepared.suites.plan()
        planned = json.loads(prepared.folder.plan.read_bytes())
    hardware = launch.present_hardware(HostTree())
    return {
        "profile": plan.profile,
        "substrate": prepared.substrate,
        "hardware": {api.value: what for api, what in hardware.items()},
        "sessions": fitting_sessions(hardware, launch.twins_available()),
        "cases": planned["cases"],
    }


def _qualify(options: Options, progress: Progress) -> tuple[Run, RunFolder]:
    began, clock = dt.datetime.now(dt.UTC), time.monotonic()
    prepared = _prepare(options, progress, began)
    commit, identity = install_paths().commit(), host_identity(HostTree())
    common = Common(
        facts_digest=prepared.facts.digest,
        seed=prepared.seed,
        commit=commit,
        version=gdrkit.__version__,
        command=options.command,
    )
    begun = Run(
        schema_version=SCHEMA_VERSION,
        started=began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        duration_s=0.0,
        command=options.command,
        profile=options.profile or "any",
        profile_about="",
        substrate=prepared.substrate,
        software_asked=options.software,
        seed=prepared.seed,
        commit=commit,
        version=gdrkit.__version__,
        exit_code=int(ExitCode.FAILED),
        verdict="The run did not end",
        causes=("its process ended before all cases had ended",),
        to_do=("run it again",),
        required=(),
        host=identity.name,
        host_id=identity.digest,
        is_interrupted=True,
        selection=_selection(options),
    )
    # From here on the folder is that of an interrupted run, until the end is written.
    prepared.folder.write_run(begun)
    try:
        plan = prepared.suites.run(common, progress.begin, progress.done)
    except (KeyboardInterrupt, SystemExit):
        place = shlex.quote(str(prepared.folder.path))
        progress.say(f"The run was interrupted; make the report of the cases that have ended: gdrkit report {place}")
        raise
    finally:
        progress.end()
        for line in prepared.suites.abandoned:
            progress.say(line)
    profile = load_profile(plan.profile)
    records = read_records(prepared.folder.records) if prepared.folder.records.exists() else ()
    outcome = decide(
        prepared.facts,
        profile,
        records,
        software_asked=options.software,
        is_part=bool(begun.selection),
    )
    run = replace(
        begun,
        duration_s=round(time.monotonic() - clock, 3),
        profile=profile.name,
        profile_about=profile.about,
        exit_code=int(outcome.code),
        verdict=outcome.verdict,
        causes=outcome.causes,
        to_do=outcome.to_do,
        required=outcome.required,
        is_interrupted=False,
    )
    prepared.folder.write_run(run)
    render(prepared.folder.path)
    return run, prepared.folder


def _selection(options: Options) -> str:
    """Return the options that select a part of the cases, quoted for a shell."""
    chosen = {"-k": options.select, "--suites": options.suites}
    return shlex.join(word for name, value in chosen.items() if value is not None for word in (name, str(value)))


def _prepare(options: Options, progress: Progress, began: dt.datetime) -> _Prepared:
    _check_set_up()
    tree = HostTree()
    present = launch.present_hardware(tree)
    software = launch.TWINNED if options.software else launch.TWINNED - present.keys()
    seed = secrets.randbits(_SEED_BITS) if options.seed is None else options.seed
    started = launch.Launch(software=software, seed=seed, isolated=True)
    environment = launch.environment(started)
    if options.profile is not None:
        load_profile(options.profile)  # An unknown name fails before the probe.
    folder = RunFolder(options.output or install_paths().runs / began.strftime("%Y%m%dT%H%M%SZ"))
    folder.make_empty()
    facts = probe(environment=environment)
    folder.facts.write_text(facts.to_json(), encoding="utf-8")
    judged = {api: found.value for api, found in substrates_of_facts(facts).items()}
    first = banner(judged)
    if first:
        progress.say(first)
    overridden = launch.overridden_hardware(started, tree)
    if overridden:
        progress.say(overridden)
    arguments = [f"--seed={seed}", f"--command={options.command}"]
    if options.profile is not None:
        arguments.append(f"--profile={options.profile}")
    if options.select is not None:
        arguments += ["-k", options.select]
    return _Prepared(folder, facts, judged, seed, Suites(folder, environment, arguments, suites=options.suites))


def _check_set_up() -> None:
    if importlib.util.find_spec("pytest") is None:
        operation, what_to_do = "import pytest", "pip install 'gdrkit[qualify]'"
        raise _missing(operation, what_to_do)
    if not (install_paths().suites / "pytest.ini").is_file():
        operation, what_to_do = "find the suites", "install gdrkit from a wheel or run it from a checkout"
        raise _missing(operation, what_to_do)


def _missing(operation: str, what_to_do: str) -> SetupMissing:
    return SetupMissing(
        api=Api.NONE,
        operation=operation,
        status=None,
        status_name="nothing",
        reason=Reason.LIBRARY_MISSING,
        what_to_do=what_to_do,
    )
