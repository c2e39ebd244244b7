"""The record of one run of a stock program, and the table that `nox -s peers` prints."""

from __future__ import annotations

import datetime as dt
import functools
import subprocess
from typing import TYPE_CHECKING

import gdrkit
from gdrkit.install_paths import install_paths
from gdrkit.inventory import probe
from gdrkit.report.record import SCHEMA_VERSION, CaseReason, Record, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hardware.peers.programs import StockProgram
    from hardware.peers.run import ProgramOutcome

__all__ = ["format_table", "make_program_record", "make_record", "query_debian_version", "query_pypi_version"]

_COMMAND = "nox -s peers"


def make_program_record(program: StockProgram, outcome: ProgramOutcome, *, version: str, substrate: str) -> Record:
    """Return the record of a run. `substrate` is what was below the APIs: ``twin`` or ``kernel_software``."""
    evidence: dict[str, object] = {
        "program": program.name,
        "package": program.package,
        "package_version": version,
        "command": outcome.command,
        "data": program.data_check,
    }
    if outcome.outputs:
        evidence["outputs"] = dict(outcome.outputs)
    numbers = {} if outcome.moved_bytes is None else {"moved_bytes": float(outcome.moved_bytes)}
    return make_record(
        program.name,
        failure=outcome.failure,
        evidence=evidence,
        numbers=numbers,
        substrate=substrate,
        apis=program.apis,
        duration_s=outcome.duration_s,
    )


def make_record(
    name: str,
    *,
    failure: str,
    evidence: dict[str, object],
    numbers: Mapping[str, float],
    substrate: str,
    duration_s: float,
    apis: Sequence[str] = ("verbs",),
) -> Record:
    """Return a record of the case ``peers::name``, which uses `apis`. The case passed if `failure` is empty."""
    if failure:
        # The format of records allows numbers only in a case that passed.
        evidence = {**evidence, "numbers": dict(numbers)}
    return Record(
        schema_version=SCHEMA_VERSION,
        case=f"peers::{name}",
        title=f"a program that is not part of this project, on {'an RDMA device' if 'verbs' in apis else 'GPUs'}",
        verdict=Verdict.FAIL if failure else Verdict.PASS,
        reasons=(CaseReason(text=failure),) if failure else (),
        profile="lab" if substrate == "kernel_software" else "bare",
        facts_digest=_compute_facts_digest(),
        substrate=dict.fromkeys(apis, substrate),
        libraries=(),
        seed=1,
        evidence=evidence,
        numbers={} if failure else dict(numbers),
        routes=(),
        duration_ms=round(duration_s * 1000, 3),
        started=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=install_paths().commit(),
        version=gdrkit.__version__,
        command=_COMMAND,
    )


@functools.cache
def _compute_facts_digest() -> str:
    return probe().digest


@functools.cache
def query_debian_version(package: str) -> str:
    """Return the version of an installed Debian package, or an empty string."""
    command = ["dpkg-query", "-W", "-f", "${Version}", package]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@functools.cache
def query_pypi_version(python: str, distribution: str) -> str:
    """Return the version of a distribution in the environment of the interpreter `python`, or an empty string."""
    python_code = f"from importlib import metadata; print(metadata.version({distribution!r}))"
    return subprocess.run([python, "-c", python_code], capture_output=True, text=True, check=False).stdout.strip()


def format_table(rows: Sequence[tuple[str, str, str, str, str]]) -> str:
    """Return a table of programs with their version, the bytes over the twin, the check of the data and the result."""
    header = ("program", "version", "bytes over the twin", "data checked", "result")
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)
