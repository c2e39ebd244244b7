"""Reader of the input of a report: a complete run, a run that did not end, or records alone.

A killed run leaves its facts and the records of the cases that had ended. A baseline (``reports/baselines``) consists
of records alone. The report states which of these inputs it was made from.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import gdrkit
from gdrkit import serialization
from gdrkit.errors import Reason, SetupMissing, UsageError
from gdrkit.exit_code import ExitCode
from gdrkit.host import KernelFacts, Limits
from gdrkit.inventory import Diagnosis, Facts, Topology
from gdrkit.report.record import Record, Verdict, parse_record, read_record_lines
from gdrkit.report.run import SCHEMA_VERSION, Run, RunFolder, is_file, make_file_error, read_bytes
from gdrkit.report.substrate import Substrate, combine, substrates_of_facts
from gdrkit.report.validation import make_malformed_error
from gdrkit.text import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["RunContents", "read_contents", "unknown_facts"]


@dataclass(frozen=True, slots=True)
class RunContents:
    """A run, its facts and its records.

    Attributes
    ----------
    run : Run
        The contents of run.json. Without run.json, or if the run did not end, some fields are derived from the records.
    facts : Facts
        The facts about the machine of the run. They are empty if ``has_facts`` is false.
    records : tuple of Record
        The records in the order in which the cases ran.
    origins : tuple of str
        File and line of each record: ``records.jsonl:12``.
    has_facts : bool
        Whether there is a facts.json in the folder of the records.
    topology : Topology or None
        The contents of topology.json, if the folder has it.
    diagnosis : Diagnosis or None
        The contents of doctor.json, if the folder has it.
    """

    run: Run
    facts: Facts
    records: tuple[Record, ...]
    origins: tuple[str, ...]
    has_facts: bool = True
    topology: Topology | None = None
    diagnosis: Diagnosis | None = None


def read_contents(path: Path) -> RunContents:
    """Read the folder of a run, a records file, or a folder of records files and possibly facts.json.

    Raises
    ------
    UsageError
        The path is none of these, or a file is malformed. The message then names the file, the line and the cause.
    SetupMissing
        The path cannot be read, for example without permission.
    """
    try:
        return _add_topology_and_diagnosis(_read_run_or_records(path), RunFolder(path))
    except SetupMissing:
        raise
    except OSError as error:
        raise make_file_error("read", path, error) from error


def _add_topology_and_diagnosis(contents: RunContents, folder: RunFolder) -> RunContents:
    """Add the topology and the diagnosis, if the folder has them. The runs of gdrkit 0.1.0 do not have them."""
    topology = diagnosis = None
    if is_file(folder.topology):
        topology = Topology.from_json(read_bytes(folder.topology), where=str(folder.topology))
    if is_file(folder.diagnosis):
        diagnosis = Diagnosis.from_json(read_bytes(folder.diagnosis), where=str(folder.diagnosis))
    return replace(contents, topology=topology, diagnosis=diagnosis)


def _read_run_or_records(path: Path) -> RunContents:
    folder = RunFolder(path)
    if is_file(folder.run):
        run = folder.read_run()
        if run.is_interrupted:
            return _read_unfinished_run(folder, run)
        records, origins, _ = _read_record_files([folder.records] if is_file(folder.records) else [])
        return RunContents(run, _read_facts(folder), records, origins)
    if is_file(folder.facts) and (is_file(folder.records) or is_file(folder.plan)):
        return _read_unfinished_run(folder)
    record_files = [path] if is_file(path) else sorted(path.glob("*.jsonl"))
    if not record_files:
        message = f"{path} is not the folder of a run: it has neither run.json nor a records file (*.jsonl)"
        raise UsageError(message, what_to_do="name a folder that gdrkit qualify has written, or a records file")
    records, origins, _ = _read_record_files(record_files)
    if not records:
        message = f"{path} has no record"
        raise UsageError(message, reason=Reason.MALFORMED)
    run = _derive_run(records, verdict=_describe_verdict_counts(records), causes=())
    if is_file(folder.facts):
        return RunContents(run, _read_facts(folder), records, origins)
    return RunContents(run, unknown_facts(), records, origins, has_facts=False)


def unknown_facts() -> Facts:
    """Return empty facts, for records without a facts.json."""
    return Facts(
        schema_version=1,
        machine="",
        python="",
        kernel=KernelFacts(None, None, (), 0, ()),
        gpus=(),
        nvidia_driver_version=None,
        rdma_devices=(),
        libraries=(),
        packages=(),
        limits=Limits(memlock_bytes=None, memlock_known=False, open_files=None, capabilities=()),
        container=(),
        cuda=None,
        cuda_failure=None,
        verbs=None,
        verbs_failure=None,
        routes=(),
        routes_failure=None,
        unreadable=(),
    )


def _read_unfinished_run(folder: RunFolder, initial_run: Run | None = None) -> RunContents:
    """Read the folder of a run that did not end.

    `initial_run` is the run.json that was written when the run began, or None if the file does not exist.
    """
    facts = _read_facts(folder)
    records, origins, is_last_line_cut_off = _read_record_files(
        [folder.records] if is_file(folder.records) else [], may_last_line_be_cut_off=True
    )
    causes = list(initial_run.causes) if initial_run else ["the process of the run ended before it wrote run.json"]
    profile, planned_cases = _read_planned_cases(folder)
    recorded_cases = {record.case for record in records}
    missing_cases = [case for case in planned_cases if case not in recorded_cases]
    if missing_cases:
        counts_text = f"no record of {len(missing_cases)} of {format_count(len(planned_cases), 'case')}"
        causes.append(f"{counts_text}; the first of them is {missing_cases[0]}")
    if is_last_line_cut_off:
        causes.append(f"the last line of {folder.records.name} is cut off and was ignored")
    run = initial_run or _derive_run(records, verdict="The run did not end", causes=(), facts=facts)
    run = replace(
        run,
        duration_s=_sum_durations_s(records),
        profile=profile or run.profile,
        exit_code=int(ExitCode.FAILED),
        causes=tuple(causes),
        to_do=run.to_do or ("run it again",),
        is_interrupted=True,
    )
    return RunContents(run, facts, records, origins)


def _read_record_files(
    files: Sequence[Path], *, may_last_line_be_cut_off: bool = False
) -> tuple[tuple[Record, ...], tuple[str, ...], bool]:
    """Return the records, the file and line of each, and whether the last line was cut off and ignored.

    Only a run that did not end may have left an incomplete last line. In any other file such a line is malformed.
    """
    records: list[Record] = []
    origins: list[str] = []
    is_last_line_cut_off = False
    for file in files:
        lines = read_record_lines(file)
        if may_last_line_be_cut_off:
            # The last item is the text after the last line end, so it is empty if no line is cut off.
            is_last_line_cut_off = bool(lines.pop().strip())
        for line_number, line in enumerate(lines, start=1):
            if line.strip():
                records.append(parse_record(line, f"{file}:{line_number}"))
                origins.append(f"{file.name}:{line_number}")
    return tuple(records), tuple(origins), is_last_line_cut_off


def _read_facts(folder: RunFolder) -> Facts:
    if not is_file(folder.facts):
        message = f"{folder.path} is not the folder of a run: {folder.facts.name} does not exist"
        raise UsageError(message, what_to_do="name a folder that gdrkit qualify has written")
    return Facts.from_json(read_bytes(folder.facts), where=str(folder.facts))


def _read_planned_cases(folder: RunFolder) -> tuple[str, list[str]]:
    """Return the name of the profile and the ids of the cases in plan.json. Both are empty without a plan.json."""
    if not is_file(folder.plan):
        return "", []
    plan_data = serialization.parse_json(read_bytes(folder.plan), where=str(folder.plan))
    cases = plan_data.get("cases") if isinstance(plan_data, dict) else None
    if not isinstance(cases, list):
        raise make_malformed_error(str(folder.plan), "an object with a list of cases", plan_data)
    case_names_or_none = [case.get("case") if isinstance(case, dict) else None for case in cases]
    case_names = [name for name in case_names_or_none if isinstance(name, str)]
    if len(case_names) < len(cases):
        where = f"{folder.plan}.cases"
        raise make_malformed_error(where, "the name of each case", cases)
    profile = plan_data.get("profile") if isinstance(plan_data, dict) else None
    return profile if isinstance(profile, str) else "", case_names


def _derive_run(records: Sequence[Record], *, verdict: str, causes: tuple[str, ...], facts: Facts | None = None) -> Run:
    """Return the properties of a run that has no run.json, as far as its records show them."""
    first_record = records[0] if records else None
    record_substrates = [
        {api: Substrate(substrate_name) for api, substrate_name in record.substrate.items()} for record in records
    ]
    substrates = combine(record_substrates) if facts is None else substrates_of_facts(facts)
    has_failure = bool(causes) or any(record.is_failure for record in records)
    return Run(
        schema_version=SCHEMA_VERSION,
        started=min((record.started for record in records), default="1970-01-01T00:00:00Z"),
        duration_s=_sum_durations_s(records),
        command=first_record.command if first_record else "",
        profile=first_record.profile if first_record else "any",
        profile_about="",
        substrate={api: substrate.value for api, substrate in sorted(substrates.items())},
        software_asked=False,
        seed=first_record.seed if first_record else 0,
        commit=first_record.commit if first_record else None,
        version=first_record.version if first_record else gdrkit.__version__,
        exit_code=int(ExitCode.FAILED if has_failure else ExitCode.NOTHING_PROVEN),
        verdict=verdict,
        causes=causes,
        to_do=("run it again",) if causes else (),
        required=(),
    )


def _sum_durations_s(records: Sequence[Record]) -> float:
    return round(sum(record.duration_ms for record in records) / 1000, 3)


def _describe_verdict_counts(records: Sequence[Record]) -> str:
    counts = Counter(record.verdict for record in records)
    word_by_verdict = {
        Verdict.PASS: "passed",
        Verdict.FAIL: "failed",
        Verdict.UNPROVEN: "unproven",
        Verdict.NOT_RUN: "did not run",
    }
    text = ", ".join(f"{counts[verdict]} {word}" for verdict, word in word_by_verdict.items() if counts[verdict])
    return f"Records of {format_count(len(records), 'case')}: {text}"
