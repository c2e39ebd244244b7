"""The steps of ``gdrkit qualify --mpi``, an MPI job with several ranks.

Each rank finds rank 0 by MPI, leaves MPI, probes its machine, and executes the requests of rank 0. Rank 0 also plans
the pairs, requests their measurement, and writes the report. Before the first pair, rank 0 writes a run.json that says
"interrupted". So ``gdrkit report`` can make a report of the measured pairs even if the job is killed.
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
from gdrkit.qualify.ranks._mpi import exchange_texts
from gdrkit.qualify.ranks.admission import RankHello, admit_ranks
from gdrkit.qualify.ranks.balance import measure_round
from gdrkit.qualify.ranks.pairs import pair_name, plan_pairs, plan_rounds
from gdrkit.qualify.ranks.rank import connect_to_rank0, serve_requests
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
# The time in which each rank must probe its machine and send the facts. A rank that is later does not take part.
_FACTS_TIMEOUT_S = 120.0
# Longest wait of rank 0 for the end of its own measuring thread.
_LOCAL_RANK_TIMEOUT_S = 30.0


def qualify_ranks(options: Options, progress: Progress, *, within_hosts: bool = False) -> int:
    """Do the work of this process in the job. Return the exit code of the job, which is the same in all ranks.

    With `within_hosts`, both ranks of a pair are on the same machine, even if the job has several machines.

    Raises
    ------
    SetupMissing
        mpi4py, an MPI library or the twins are not installed.
    UsageError
        The profile does not exist or does not fit the machine of rank 0.
    """
    # A process learns its rank only from the exchange. So each process listens and sends its contact data, but only the
    # listener and the contact data of rank 0 are used.
    listener = socket.create_server(("", 0), backlog=1024)
    contact_data = {
        "addresses": _list_ipv4_addresses(),
        "port": listener.getsockname()[1],
        "token": secrets.token_hex(16),
        "seed": secrets.randbits(_SEED_BITS) if options.seed is None else options.seed,
    }
    rank, contact_texts = exchange_texts(json.dumps(contact_data))
    rank0_contact = json.loads(contact_texts[0])
    present_hardware = launch.present_hardware(HostTree())
    twin_apis = launch.APIS_WITH_TWINS if options.uses_only_twins else launch.APIS_WITH_TWINS - present_hardware.keys()
    # Software twins (libraries that emulate the hardware) have the same devices in all processes of a domain. So the
    # ranks of a machine can access the memory of each other.
    launch_options = launch.Launch(
        twin_apis=twin_apis, seed=rank0_contact["seed"], domain=f"job-{rank0_contact['token'][:12]}"
    )
    environment = launch.environment(launch_options)
    hello = RankHello(rank0_contact["token"], rank, _identify_host(), gdrkit.__version__)

    def join_and_measure() -> int:
        # Probe before connect_to_rank0(): the probe is slow, and a connected rank should send its facts without delay.
        facts = probe(environment=environment)
        return serve_requests(connect_to_rank0(rank0_contact, hello), facts, environment)

    _detach_from_mpi()
    if rank != 0:
        listener.close()
        return join_and_measure()
    with listener:
        # Rank 0 also measures, like every other rank.
        local_rank = _LocalRank(join_and_measure)
        local_rank.start()
        job = _Job(replace(options, seed=rank0_contact["seed"]), _OptionalProgress(progress), within_hosts=within_hosts)
        code = job.run(listener, len(contact_texts), rank0_contact["token"], local_rank)
        local_rank.join(_LOCAL_RANK_TIMEOUT_S)
    return code


def _detach_from_mpi() -> None:
    """Continue in a child process in a new session, which MPI does not kill.

    If one process of a job dies, MPI waits one second and then kills the other processes that it started. But their
    children continue: they measure, and the child of rank 0 writes the report. The process that MPI started waits for
    its child and exits with the exit code of the child. If the child of rank 0 ends, the other children also end,
    because their connections to it are closed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child_id = os.fork()
    if child_id != 0:
        _, status = os.waitpid(child_id, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    os.setsid()


class _OptionalProgress:
    """A progress display that rank 0 no longer uses after the first output error.

    Output fails when MPI ends the job, because MPI then closes the terminal or pipe. Rank 0 continues without output.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress: Progress | None = progress

    def print_line(self, line: str) -> None:
        """Print a line."""
        self._display(lambda progress: progress.print_line(line))

    def begin_cases(self, plan: CasePlan) -> None:
        """Start the display of the cases of `plan`."""
        self._display(lambda progress: progress.begin_cases(plan))

    def show_record(self, record: Record) -> None:
        """Show a case that has completed."""
        self._display(lambda progress: progress.show_record(record))

    def close(self) -> None:
        """End the display."""
        self._display(lambda progress: progress.close())

    def _display(self, action: Callable[[Progress], None]) -> None:
        if self._progress is not None:
            try:
                action(self._progress)
            except OSError:
                self._progress = None


class _LocalRank(threading.Thread):
    """The thread in which the process of rank 0 executes the requests of the job, as every other rank does."""

    def __init__(self, join_and_measure: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._join_and_measure = join_and_measure
        self.error: GdrkitError | None = None

    def run(self) -> None:
        """Join the job and execute requests until the job ends. Store a GdrkitError in ``error``."""
        try:
            self._join_and_measure()
        except GdrkitError as error:
            self.error = error


class _Job:
    """The tasks of rank 0: admit the ranks, measure all pairs, and write the report."""

    def __init__(self, options: Options, progress: Progress, *, within_hosts: bool) -> None:
        self._options = options
        self._progress = progress
        self._within_hosts = within_hosts
        self._host_identity = host_identity(HostTree())
        self._start_time, self._clock_start_s = dt.datetime.now(dt.UTC), time.monotonic()
        self.folder = RunFolder(options.output or install_paths().runs / self._start_time.strftime("%Y%m%dT%H%M%SZ"))

    def run(self, listener: socket.socket, rank_count: int, token: str, local_rank: _LocalRank) -> int:
        """Admit the ranks, measure, and write the report. Send the exit code of the job to all ranks, and return it."""
        admitted = admit_ranks(
            listener,
            rank_count=rank_count,
            token=token,
            timeout_s=_FACTS_TIMEOUT_S,
            should_stop=lambda: not local_rank.is_alive(),
        )
        code = int(ExitCode.FAILED)
        try:
            if 0 not in admitted.ranks:
                message = f"rank 0 did not probe its machine within {_FACTS_TIMEOUT_S:g} s"
                raise local_rank.error or GdrkitError(message)
            code = self._measure_and_report(admitted, rank_count)
        except GdrkitError as error:
            # mpirun exits with the code of the rank that ends first, so all ranks need the same code.
            code = int(ExitCode.of(error))
            raise
        finally:
            admitted.send_exit_code(code)
        return code

    def _measure_and_report(self, admitted: AdmittedRanks, rank_count: int) -> int:
        ranks = admitted.ranks
        facts = ranks[0].rank_facts.facts
        substrates = {api: substrate.value for api, substrate in substrates_of_facts(facts).items()}
        profile_name = self._options.profile
        profile = load_profile(profile_name) if profile_name else choose_profile(load_profiles(), facts, substrates)
        self._prepare_folder(ranks, profile, substrates)
        recorder = PairRecorder(
            self.folder.records, ranks[0].rank_facts, profile=profile, options=self._options, progress=self._progress
        )
        rank_facts = [proxy.rank_facts for proxy in ranks.values()]
        pairs = plan_pairs(rank_facts, within_hosts=self._within_hosts)
        rounds = () if self._within_hosts else plan_rounds(rank_facts)
        self._progress.print_line(f"{len(ranks)} of {rank_count} ranks; the report will be {self.folder.index}")
        case_names = [pair_name(pair) for pair in pairs]
        case_names += [
            pair_name(pair, f"balance/{round_plan.name}") for round_plan in rounds for pair in round_plan.pairs
        ]
        planned_cases = tuple(PlannedCase(case=name, title="", needs=(), unmet=()) for name in case_names)
        self._progress.begin_cases(CasePlan(profile=profile.name, cases=planned_cases))
        try:
            for rank, reason in self._list_missing_ranks(admitted, rank_count):
                recorder.record_missing_rank(rank, reason)
            for pair in pairs:
                recorder.measure(pair, ranks)
            for round_plan in rounds:
                for result in measure_round(round_plan, ranks, seed=self._options.seed or 0):
                    recorder.append(result)
        finally:
            self._progress.close()
        records = read_records(self.folder.records) if self.folder.records.exists() else ()
        outcome = decide(facts, profile, records, uses_only_twins=self._options.uses_only_twins, is_part=True)
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
        # The result is printed before the ranks receive the exit code, because MPI may end the job as soon as one rank
        # exits with an error.
        detail_lines = [f"  {line}" for line in (*outcome.causes, *(f"To do: {step}" for step in outcome.to_do))]
        for line in (outcome.verdict, *detail_lines, f"Report: {self.folder.index}"):
            self._progress.print_line(line)
        return int(outcome.code)

    @staticmethod
    def _list_missing_ranks(admitted: AdmittedRanks, rank_count: int) -> Iterator[tuple[int, str]]:
        for rank in sorted(set(range(rank_count)) - admitted.ranks.keys()):
            default_reason = f"rank {rank} did not send its facts within {_FACTS_TIMEOUT_S:g} s"
            yield rank, admitted.rejected.get(rank, default_reason)

    def _prepare_folder(self, ranks: Mapping[int, RankProxy], profile: Profile, substrates: dict[str, str]) -> None:
        """Write the facts of all ranks, and a run.json that says "interrupted" in case the job is killed."""
        self.folder.make_empty()
        make_folder(self.folder.hosts)
        write_atomically(self.folder.facts, ranks[0].rank_facts.facts.to_json())
        for rank, proxy in ranks.items():
            write_atomically(self.folder.hosts / f"rank-{rank}.json", proxy.rank_facts.facts.to_json())
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
            started=self._start_time.strftime("%Y-%m-%dT%H:%M:%SZ"),
            duration_s=round(time.monotonic() - self._clock_start_s, 3),
            command=self._options.command,
            profile=profile.name,
            profile_about=profile.about,
            substrate=substrates,
            software_asked=self._options.uses_only_twins,
            seed=self._options.seed or 0,
            commit=install_paths().commit(),
            version=gdrkit.__version__,
            host=self._host_identity.name,
            host_id=self._host_identity.digest,
            **outcome,
        )
        self.folder.write_run(run)


def _identify_host() -> str:
    """Return the identity of this machine: host name, part of the boot id, and inode of the network namespace.

    So a container with a network namespace of its own counts as a separate machine.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot_id[:8]} {Path('/proc/self/ns/net').stat().st_ino}"


def _list_ipv4_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine, with loopback addresses last."""
    lines = Path("/proc/net/fib_trie").read_text(encoding="ascii").splitlines()
    # In fib_trie, the line "/32 host LOCAL" follows the line with a local address.
    local_addresses = [
        previous_line.split()[-1]
        for previous_line, line in itertools.pairwise(lines)
        if line.strip() == "/32 host LOCAL"
    ]
    return sorted(dict.fromkeys(local_addresses), key=lambda address: address.startswith("127."))
