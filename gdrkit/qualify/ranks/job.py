"""The steps of a job of several ranks, and the tasks of rank 0.

From its first second the folder holds a run, so that a report of the measured pairs exists even if the job is killed.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gdrkit
from gdrkit import launch
from gdrkit.errors import GdrkitError
from gdrkit.exit_code import ExitCode
from gdrkit.host import HostTree, host_identity
from gdrkit.install_paths import install_paths
from gdrkit.inventory import choose_profile, load_profile, load_profiles, probe
from gdrkit.qualify.outcome import decide
from gdrkit.qualify.plan import Plan, PlannedCase
from gdrkit.qualify.ranks._mpi import gather
from gdrkit.qualify.ranks.arrivals import Hello, receive_ranks
from gdrkit.qualify.ranks.pairs import name_of, plan_pairs
from gdrkit.qualify.ranks.rank import join, serve
from gdrkit.qualify.ranks.rows import Rows
from gdrkit.report import Run, RunFolder, read_records
from gdrkit.report.render import render
from gdrkit.report.run import SCHEMA_VERSION, banner, make_folder, write_atomically
from gdrkit.report.substrate import substrates_of_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gdrkit.inventory import Profile
    from gdrkit.qualify.ranks.arrivals import Arrived
    from gdrkit.qualify.ranks.member import Member
    from gdrkit.qualify.run import Options, Progress
    from gdrkit.report import Record

__all__ = ["qualify_ranks"]

_SEED_BITS = 63
# By this time, in seconds, all ranks have probed their machines. Later ranks do not take part.
_REPORT_S = 120.0
_END_S = 30.0


def qualify_ranks(options: Options, progress: Progress, *, within_hosts: bool = False) -> int:
    """Run this rank of the job, and return its exit code, which is the same for all ranks.

    Raises
    ------
    SetupMissing
        mpi4py, an MPI library or the twins are not installed.
    UsageError
        The profile does not exist or does not fit.
    """
    listener = socket.create_server(("", 0), backlog=1024)
    mine = {
        "addresses": _addresses(),
        "port": listener.getsockname()[1],
        "token": secrets.token_hex(16),
        "seed": secrets.randbits(_SEED_BITS) if options.seed is None else options.seed,
    }
    rank, gathered = gather(json.dumps(mine))
    first = json.loads(gathered[0])
    present = launch.present_hardware(HostTree())
    software = launch.TWINNED if options.software else launch.TWINNED - present.keys()
    # The job has one domain of twins, so that ranks of one machine see each other's devices like processes of one
    # machine.
    started = launch.Launch(software=software, seed=first["seed"], domain=f"job-{first['token'][:12]}")
    environment = launch.environment(started)
    hello = Hello(first["token"], rank, _host(), gdrkit.__version__)

    def take_part() -> int:
        facts = probe(environment=environment)  # Probing is slow, and a connected rank has only seconds.
        return serve(join(first, hello), facts, environment)

    if rank != 0:
        listener.close()
        return take_part()
    _leave_group()
    with listener:
        # Rank 0 also measures, like any other rank.
        own = _Own(take_part)
        own.start()
        heard = _WhileHeard(progress)
        job = _Job(replace(options, seed=first["seed"]), heard, within_hosts=within_hosts)
        code = job.run(listener, len(gathered), first["token"], own)
        own.join(_END_S)
    return code


def _leave_group() -> None:
    """Continue in a child process with its own session, which MPI does not kill.

    MPI ends a whole job one second after its first process has died, even if the job is busy. The report must be
    written then. The process that MPI knows stays, and ends with the exit code of the child.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child != 0:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    os.setsid()


class _WhileHeard:
    """Progress display until its terminal or pipe is gone, which is the case after MPI has ended the job."""

    def __init__(self, progress: Progress) -> None:
        self._progress: Progress | None = progress

    def say(self, line: str) -> None:
        """Print a line."""
        self._tell(lambda progress: progress.say(line))

    def begin(self, plan: Plan) -> None:
        """Begin the cases of `plan`."""
        self._tell(lambda progress: progress.begin(plan))

    def done(self, record: Record) -> None:
        """Print a case that has ended."""
        self._tell(lambda progress: progress.done(record))

    def end(self) -> None:
        """End the cases."""
        self._tell(lambda progress: progress.end())

    def _tell(self, tell: Callable[[Progress], None]) -> None:
        if self._progress is not None:
            try:
                tell(self._progress)
            except OSError:
                self._progress = None


class _Own(threading.Thread):
    """The thread in which rank 0 acts as a rank."""

    def __init__(self, take_part: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._take_part = take_part
        self.error: GdrkitError | None = None

    def run(self) -> None:
        """Take part in the job as a rank."""
        try:
            self._take_part()
        except GdrkitError as error:
            self.error = error


class _Job:
    def __init__(self, options: Options, progress: Progress, *, within_hosts: bool) -> None:
        self._options = options
        self._progress = progress
        self._within_hosts = within_hosts
        self._identity = host_identity(HostTree())
        self._began, self._clock = dt.datetime.now(dt.UTC), time.monotonic()
        self.folder = RunFolder(options.output or install_paths().runs / self._began.strftime("%Y%m%dT%H%M%SZ"))

    def run(self, listener: socket.socket, count: int, token: str, own: _Own) -> int:
        """Gather the ranks, measure, write the report, and return the exit code, which all ranks receive."""
        arrived = receive_ranks(
            listener, count=count, token=token, limit_s=_REPORT_S, is_hopeless=lambda: not own.is_alive()
        )
        code = int(ExitCode.FAILED)
        try:
            if 0 not in arrived.members:
                message = f"rank 0 did not look at its machine within {_REPORT_S:g} s"
                raise own.error or GdrkitError(message)
            code = self._measure(arrived, count)
        except GdrkitError as error:
            code = int(ExitCode.of(error))  # MPI ends with the code of the first rank that ends.
            raise
        finally:
            arrived.end(code)
        return code

    def _measure(self, arrived: Arrived, count: int) -> int:
        ranks = arrived.members
        facts = ranks[0].about.facts
        judged = {api: found.value for api, found in substrates_of_facts(facts).items()}
        name = self._options.profile
        profile = load_profile(name) if name else choose_profile(load_profiles(), facts, judged)
        self._prepare(ranks, profile, judged)
        rows = Rows(
            self.folder.records, ranks[0].about, profile=profile, options=self._options, progress=self._progress
        )
        pairs = plan_pairs([each.about for each in ranks.values()], within_hosts=self._within_hosts)
        self._progress.say(f"{len(ranks)} of {count} ranks; the report will be {self.folder.index}")
        planned = [PlannedCase(name_of(pair), "", (), ()) for pair in pairs]
        self._progress.begin(Plan(profile=profile.name, cases=tuple(planned)))
        try:
            for number, why in self._missing(arrived, count):
                rows.missing(number, why)
            for pair in pairs:
                rows.measure(pair, ranks)
        finally:
            self._progress.end()
        records = read_records(self.folder.records) if self.folder.records.exists() else ()
        outcome = decide(facts, profile, records, software_asked=self._options.software, is_part=True)
        self._write(
            profile,
            judged,
            exit_code=int(outcome.code),
            verdict=outcome.verdict,
            causes=outcome.causes,
            to_do=outcome.to_do,
            required=outcome.required,
        )
        render(self.folder.path)
        # The lines are printed before the ranks receive the code, as MPI may end the job with the first rank that
        # fails.
        causes = [f"  {line}" for line in (*outcome.causes, *(f"To do: {line}" for line in outcome.to_do))]
        for line in (outcome.verdict, *causes, f"Report: {self.folder.index}"):
            self._progress.say(line)
        return int(outcome.code)

    @staticmethod
    def _missing(arrived: Arrived, count: int) -> Iterator[tuple[int, str]]:
        for number in sorted(set(range(count)) - arrived.members.keys()):
            yield number, arrived.refused.get(number, f"rank {number} did not report within {_REPORT_S:g} s")

    def _prepare(self, ranks: Mapping[int, Member], profile: Profile, judged: dict[str, str]) -> None:
        """Make the folder such that a report can be made of it from now on."""
        self.folder.make_empty()
        make_folder(self.folder.hosts)
        write_atomically(self.folder.facts, ranks[0].about.facts.to_json())
        for number, each in ranks.items():
            write_atomically(self.folder.hosts / f"rank-{number}.json", each.about.facts.to_json())
        first = banner(judged)
        if first:
            self._progress.say(first)
        self._write(
            profile,
            judged,
            exit_code=int(ExitCode.FAILED),
            verdict="The job did not come to its end",
            causes=("the job was ended before every pair was measured",),
            to_do=("run it again; what was measured until then is below",),
            required=(),
            is_interrupted=True,
        )

    def _write(self, profile: Profile, judged: dict[str, str], **ended: Any) -> None:  # noqa: ANN401 - fields of Run.
        run = Run(
            schema_version=SCHEMA_VERSION,
            started=self._began.strftime("%Y-%m-%dT%H:%M:%SZ"),
            duration_s=round(time.monotonic() - self._clock, 3),
            command=self._options.command,
            profile=profile.name,
            profile_about=profile.about,
            substrate=judged,
            software_asked=self._options.software,
            seed=self._options.seed or 0,
            commit=install_paths().commit(),
            version=gdrkit.__version__,
            host=self._identity.name,
            host_id=self._identity.digest,
            **ended,
        )
        self.folder.write_run(run)


def _host() -> str:
    """Return the identity of a machine: host name, boot id, network namespace. A container may have its own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot[:8]} {Path('/proc/self/ns/net').stat().st_ino}"


def _addresses() -> list[str]:
    """Return the IPv4 addresses of this machine, with loopback addresses last."""
    lines = Path("/proc/net/fib_trie").read_text(encoding="ascii").splitlines()
    local = [above.split()[-1] for above, line in itertools.pairwise(lines) if line.strip() == "/32 host LOCAL"]
    return sorted(dict.fromkeys(local), key=lambda address: address.startswith("127."))
