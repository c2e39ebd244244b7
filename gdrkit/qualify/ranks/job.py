"""The steps of a job of several ranks; most of them are tasks of rank 0.

Rank 0 writes an unfinished run into the folder before the first pair, so that even after the job was killed a report of
the measured pairs can be made.
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
from gdrkit.qualify.plan import CasePlan, PlannedCase
from gdrkit.qualify.ranks._mpi import gather
from gdrkit.qualify.ranks.admission import RankHello, admit_ranks
from gdrkit.qualify.ranks.pairs import pair_name, plan_pairs
from gdrkit.qualify.ranks.rank import join, serve
from gdrkit.qualify.ranks.recorder import PairRecorder
from gdrkit.report import Run, RunFolder, read_records
from gdrkit.report.render import render
from gdrkit.report.run import SCHEMA_VERSION, banner, make_folder, write_atomically
from gdrkit.report.substrate import substrates_of_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gdrkit.inventory import Profile
    from gdrkit.qualify.ranks.admission import AdmittedRanks
    from gdrkit.qualify.ranks.proxy import RankProxy
    from gdrkit.qualify.run import Options, Progress
    from gdrkit.report import Record

__all__ = ["qualify_ranks"]

_SEED_BITS = 63
# The time in which the ranks probe their machines and connect. Ranks that are late do not take part.
_FACTS_TIMEOUT_S = 120.0
_LOCAL_RANK_TIMEOUT_S = 30.0


def qualify_ranks(options: Options, progress: Progress, *, within_hosts: bool = False) -> int:
    """Run this rank of the job, and return the exit code, which is the same for all ranks.

    Raises
    ------
    SetupMissing
        mpi4py, an MPI library or the twins are not installed.
    UsageError
        The profile does not exist or does not fit.
    """
    listener = socket.create_server(("", 0), backlog=1024)
    own_address = {
        "addresses": _addresses(),
        "port": listener.getsockname()[1],
        "token": secrets.token_hex(16),
        "seed": secrets.randbits(_SEED_BITS) if options.seed is None else options.seed,
    }
    rank, gathered = gather(json.dumps(own_address))
    first = json.loads(gathered[0])
    present = launch.present_hardware(HostTree())
    software = launch.TWINNED if options.software else launch.TWINNED - present.keys()
    # All ranks use one domain of the twins, so that the ranks of one machine can access each other's twin devices.
    launched = launch.Launch(software=software, seed=first["seed"], domain=f"job-{first['token'][:12]}")
    environment = launch.environment(launched)
    hello = RankHello(first["token"], rank, _host_identity(), gdrkit.__version__)

    def take_part() -> int:
        # The probe is slow. It comes first, because a connected rank must send its facts without delay.
        facts = probe(environment=environment)
        return serve(join(first, hello), facts, environment)

    if rank != 0:
        listener.close()
        return take_part()
    _detach_from_mpi()
    with listener:
        # Rank 0 also measures, like every other rank.
        local_rank = _LocalRank(take_part)
        local_rank.start()
        job = _Job(replace(options, seed=first["seed"]), _OptionalProgress(progress), within_hosts=within_hosts)
        code = job.run(listener, len(gathered), first["token"], local_rank)
        local_rank.join(_LOCAL_RANK_TIMEOUT_S)
    return code


def _detach_from_mpi() -> None:
    """Continue in a child process with its own session, which MPI does not kill.

    MPI kills all processes of a job one second after the first one has died. Rank 0 must still write the report then.
    The process that MPI has started remains, and exits with the code of the child.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child != 0:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    os.setsid()


class _OptionalProgress:
    """A progress display that stops at the first output error: MPI closes the terminal or pipe with the job."""

    def __init__(self, progress: Progress) -> None:
        self._progress: Progress | None = progress

    def print_line(self, line: str) -> None:
        """Print a line."""
        self._display(lambda progress: progress.print_line(line))

    def begin(self, plan: CasePlan) -> None:
        """Start the display of the cases of `plan`."""
        self._display(lambda progress: progress.begin(plan))

    def done(self, record: Record) -> None:
        """Show a case that has completed."""
        self._display(lambda progress: progress.done(record))

    def end(self) -> None:
        """End the display."""
        self._display(lambda progress: progress.end())

    def _display(self, action: Callable[[Progress], None]) -> None:
        if self._progress is not None:
            try:
                action(self._progress)
            except OSError:
                self._progress = None


class _LocalRank(threading.Thread):
    """The thread in which the process of rank 0 also measures, like every other rank."""

    def __init__(self, take_part: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._take_part = take_part
        self.error: GdrkitError | None = None

    def run(self) -> None:
        """Take part in the job, and keep the error."""
        try:
            self._take_part()
        except GdrkitError as error:
            self.error = error


class _Job:
    """The job as rank 0 executes it."""

    def __init__(self, options: Options, progress: Progress, *, within_hosts: bool) -> None:
        self._options = options
        self._progress = progress
        self._within_hosts = within_hosts
        self._identity = host_identity(HostTree())
        self._started, self._clock_start_s = dt.datetime.now(dt.UTC), time.monotonic()
        self.folder = RunFolder(options.output or install_paths().runs / self._started.strftime("%Y%m%dT%H%M%SZ"))

    def run(self, listener: socket.socket, count: int, token: str, local_rank: _LocalRank) -> int:
        """Admit the ranks, measure, write the report, and return the exit code, which all ranks receive."""
        admitted = admit_ranks(
            listener,
            count=count,
            token=token,
            timeout_s=_FACTS_TIMEOUT_S,
            should_stop=lambda: not local_rank.is_alive(),
        )
        code = int(ExitCode.FAILED)
        try:
            if 0 not in admitted.ranks:
                message = f"rank 0 did not probe its machine within {_FACTS_TIMEOUT_S:g} s"
                raise local_rank.error or GdrkitError(message)
            code = self._measure(admitted, count)
        except GdrkitError as error:
            # MPI exits with the code of the rank that ends first, so all ranks need the same code.
            code = int(ExitCode.of(error))
            raise
        finally:
            admitted.send_exit_code(code)
        return code

    def _measure(self, admitted: AdmittedRanks, count: int) -> int:
        ranks = admitted.ranks
        facts = ranks[0].rank_facts.facts
        substrates = {api: substrate.value for api, substrate in substrates_of_facts(facts).items()}
        name = self._options.profile
        profile = load_profile(name) if name else choose_profile(load_profiles(), facts, substrates)
        self._prepare_folder(ranks, profile, substrates)
        recorder = PairRecorder(
            self.folder.records, ranks[0].rank_facts, profile=profile, options=self._options, progress=self._progress
        )
        pairs = plan_pairs([each.rank_facts for each in ranks.values()], within_hosts=self._within_hosts)
        self._progress.print_line(f"{len(ranks)} of {count} ranks; the report will be {self.folder.index}")
        planned = [PlannedCase(pair_name(pair), "", (), ()) for pair in pairs]
        self._progress.begin(CasePlan(profile=profile.name, cases=tuple(planned)))
        try:
            for number, reason in self._missing_ranks(admitted, count):
                recorder.record_missing_rank(number, reason)
            for pair in pairs:
                recorder.measure(pair, ranks)
        finally:
            self._progress.end()
        records = read_records(self.folder.records) if self.folder.records.exists() else ()
        outcome = decide(facts, profile, records, software_asked=self._options.software, is_part=True)
        self._write_run(
            profile,
            substrates,
            exit_code=int(outcome.code),
            verdict=outcome.verdict,
            causes=outcome.causes,
            to_do=outcome.to_do,
            required=outcome.required,
        )
        render(self.folder.path)
        # The result is printed before the ranks receive the exit code: MPI may end the job with the first rank that
        # exits with an error.
        causes = [f"  {line}" for line in (*outcome.causes, *(f"To do: {line}" for line in outcome.to_do))]
        for line in (outcome.verdict, *causes, f"Report: {self.folder.index}"):
            self._progress.print_line(line)
        return int(outcome.code)

    @staticmethod
    def _missing_ranks(admitted: AdmittedRanks, count: int) -> Iterator[tuple[int, str]]:
        for number in sorted(set(range(count)) - admitted.ranks.keys()):
            late = f"rank {number} did not send its facts within {_FACTS_TIMEOUT_S:g} s"
            yield number, admitted.rejected.get(number, late)

    def _prepare_folder(self, ranks: Mapping[int, RankProxy], profile: Profile, substrates: dict[str, str]) -> None:
        """Write the facts and an unfinished run, so that a report can be made at any time from now on."""
        self.folder.make_empty()
        make_folder(self.folder.hosts)
        write_atomically(self.folder.facts, ranks[0].rank_facts.facts.to_json())
        for number, each in ranks.items():
            write_atomically(self.folder.hosts / f"rank-{number}.json", each.rank_facts.facts.to_json())
        if line := banner(substrates):
            self._progress.print_line(line)
        self._write_run(
            profile,
            substrates,
            exit_code=int(ExitCode.FAILED),
            verdict="The job did not end",
            causes=("the job was killed before all pairs were measured",),
            to_do=("run it again; this report contains the pairs that were measured",),
            required=(),
            is_interrupted=True,
        )

    def _write_run(self, profile: Profile, substrates: dict[str, str], **outcome: Any) -> None:  # noqa: ANN401 - fields of Run.
        run = Run(
            schema_version=SCHEMA_VERSION,
            started=self._started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            duration_s=round(time.monotonic() - self._clock_start_s, 3),
            command=self._options.command,
            profile=profile.name,
            profile_about=profile.about,
            substrate=substrates,
            software_asked=self._options.software,
            seed=self._options.seed or 0,
            commit=install_paths().commit(),
            version=gdrkit.__version__,
            host=self._identity.name,
            host_id=self._identity.digest,
            **outcome,
        )
        self.folder.write_run(run)


def _host_identity() -> str:
    """Return the identity of this machine: host name, boot id, network namespace.

    A container with its own network namespace counts as a machine.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot[:8]} {Path('/proc/self/ns/net').stat().st_ino}"


def _addresses() -> list[str]:
    """Return the IPv4 addresses of this machine, with loopback addresses last."""
    lines = Path("/proc/net/fib_trie").read_text(encoding="ascii").splitlines()
    # An address is on the line above its entry "/32 host LOCAL".
    local = [above.split()[-1] for above, line in itertools.pairwise(lines) if line.strip() == "/32 host LOCAL"]
    return sorted(dict.fromkeys(local), key=lambda address: address.startswith("127."))
