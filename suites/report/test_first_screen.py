"""The first part of a report page has the host, its devices, path states with causes, matrices and measurements."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from support.hosts import HARDWARE_SUBSTRATES, make_host_facts, make_host_records, write_run
from support.records import make_facts, make_proven_route, make_record, make_run

from gdrkit import serialization
from gdrkit.errors import Reason, UsageError
from gdrkit.inventory import Topology, diagnose, this_machine, topology
from gdrkit.inventory.topology import TopologyDevice
from gdrkit.registration import Balance, NicLoad
from gdrkit.report import CaseReason, ClaimedFile, ClaimedRoute, RunFolder, Verdict
from gdrkit.report.contents import read_contents
from gdrkit.report.describe import make_headline_rows
from gdrkit.report.matrix import balance_matrix, distance_matrix, path_matrix
from gdrkit.report.measurements import measurements, to_words
from gdrkit.report.render import render, render_html
from gdrkit.report.routes import file_statuses, route_statuses

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.report import Record
    from gdrkit.report.matrix import PathMatrix


def make_path_matrix(records: list[Record]) -> PathMatrix:
    matrix = path_matrix(make_facts(), route_statuses(make_facts(), records), file_statuses(make_facts(), records))
    assert matrix is not None
    return matrix


def make_topology() -> Topology:
    # The fields are the name, kind, PCI address, NUMA node, bridges above the device, and PCIe link.
    devices = (
        TopologyDevice("GPU0", "gpu", "0000:1b:00.0", 0, (), "32.0 GT/s PCIe x16"),
        TopologyDevice("mlx5_0", "nic", "0000:1c:00.0", 0, (), ""),
        TopologyDevice("mlx5_1", "nic", "0000:9c:00.0", None, (), ""),
    )
    distances = {
        "GPU0": {"mlx5_0": "PIX", "mlx5_1": "SYS"},
        "mlx5_0": {"GPU0": "PIX", "mlx5_1": "SYS"},
        "mlx5_1": {"GPU0": "SYS", "mlx5_0": "SYS"},
    }
    return Topology(
        schema_version=1,
        places=devices,
        distances=distances,
        bridges={},
        virtual_machine=None,
        numa_cpus={"0": "0-31"},
    )


def test_headline_names_devices_and_drivers() -> None:
    rows = dict(make_headline_rows(make_host_facts(gpu_count=8, nic_count=6)))
    assert rows["GPUs"] == "8 x NVIDIA H200"
    assert rows["NICs"].startswith("mlx5_0 (400 Gb/sec (4X NDR)), mlx5_1")
    assert rows["NICs"].endswith("mlx5_3 (400 Gb/sec (4X NDR)), 2 more")
    assert rows["NVIDIA driver"] == "580.159.04, CUDA 13.0"
    assert dict(make_headline_rows(make_facts()))["NICs"] == "none"


def test_host_name_is_before_the_verdict(tmp_path: Path) -> None:
    facts = make_host_facts(gpu_count=1, nic_count=1)
    page_html = render(
        write_run(tmp_path / "run", facts, list(make_host_records(facts)), host="node7")
    ).index.read_text()
    assert (
        page_html.index('<p class="hostname">node7</p>') < page_html.index("<h1>") < page_html.index('<h2 id="paths">')
    )
    assert "<title>node7: " in page_html


def test_page_says_that_records_do_not_name_the_host(tmp_path: Path) -> None:
    facts = make_host_facts(gpu_count=1, nic_count=1)
    run_path = write_run(tmp_path / "run", facts, list(make_host_records(facts)), host="node7")
    RunFolder(run_path).run.unlink()
    page_html = render(run_path).index.read_text()
    assert page_html.index('<p class="hostname">Host name not recorded</p>') < page_html.index("<h1>")


def test_titles_of_measurements_have_the_field_spelling() -> None:
    assert to_words("o_direct, fastest_threads_cpu") == "O_DIRECT, fastest threads CPU"
    assert to_words("pinned_copy") == "pinned copy"


def test_cell_has_the_cause_of_its_state() -> None:
    records = [
        make_record(routes=(make_proven_route(0, "mlx5_0"),), substrate=HARDWARE_SUBSTRATES),
        make_record(
            Verdict.UNPROVEN,
            case="a.py::test_b",
            routes=(ClaimedRoute(0, "mlx5_1", "dmabuf"), ClaimedRoute(1, "mlx5_1", "dmabuf")),
            reasons=(CaseReason("no counter moved"),),
            substrate=HARDWARE_SUBSTRATES,
        ),
        make_record(
            case="a.py::test_c",
            files=(ClaimedFile(0, "/data", "engine", "no nvidia-fs"),),
            substrate=HARDWARE_SUBSTRATES,
        ),
    ]
    matrix = make_path_matrix(records)
    assert [(column.kind, column.name) for column in matrix.columns] == [
        ("NIC", "mlx5_0"),
        ("NIC", "mlx5_1"),
        ("mount", "/data"),
    ]
    # A cell has the state of a pair and the number of its cause. It is None if no case tested the pair.
    states_and_causes = [[cell and (cell.state, cell.cause_number) for cell in cells] for _, _, cells in matrix.rows]
    assert states_and_causes == [[("proven", 0), ("unproven", 1), ("fell_back", 2)], [None, ("unproven", 1), None]]
    first_cause = matrix.causes[0]
    assert (first_cause.number, first_cause.text, first_cause.pair_count) == (1, "no counter moved", 2)
    assert matrix.kinds == (("NICs", 2), ("mount", 1))


def test_fallback_wins_over_a_proven_route_of_a_pair() -> None:
    records = [
        make_record(case="a.py::test_a", routes=(make_proven_route(0, "mlx5_0"),), substrate=HARDWARE_SUBSTRATES),
        make_record(
            case="a.py::test_b",
            routes=(ClaimedRoute(0, "mlx5_0", "peer_memory", "by the host"),),
            substrate=HARDWARE_SUBSTRATES,
        ),
    ]
    matrix = make_path_matrix(records)
    ((_, _, (cell,)),) = matrix.rows
    (cause,) = matrix.causes
    assert cell is not None
    assert (cell.state, cell.cause_number, cell.case) == ("fell_back", 1, "a.py::test_b")
    assert cause.text == "by the host"


def test_wide_matrix_has_symbols_and_hidden_words() -> None:
    facts = make_host_facts(gpu_count=8, nic_count=8)
    page_html = render_html(make_run(), facts, list(make_host_records(facts)))
    (table,) = re.findall(r'<table class="grid narrow">.*?</table>', page_html, re.DOTALL)
    # 16 of the 64 pairs of a GPU and a NIC fell back. The table has two rows of headings and a row for each GPU.
    assert table.count('<span class="hidden">fell back</span>') >= 16
    assert table.count("<tr>") == 2 + 8


def test_distances_are_those_of_nvidia_smi() -> None:
    matrix = distance_matrix(make_topology())
    assert matrix is not None
    assert matrix.rows[0] == ("GPU0", ("", "PIX", "SYS"), "0", "0-31", "32.0 GT/s PCIe x16")
    assert matrix.rows[2] == ("mlx5_1", ("SYS", "SYS", ""), "unknown", "unknown", "unknown")
    assert [name for name, _ in matrix.legend] == ["PIX", "SYS"]
    assert distance_matrix(None) is None


def make_balance() -> Balance:
    # The fields are the NIC, its link in Gbit/s, its moved and counted bytes, and its actual and expected share in %.
    loads = (
        NicLoad("mlx5_0", 400.0, 9_000_000_000, 18_300_000_000, 90.0, 50.0),
        NicLoad("mlx5_1", 400.0, 1_000_000_000, 2_100_000_000, 10.0, 50.0),
    )
    moved_bytes_by_gpu_and_nic = ((9_000_000_000, 1_000_000_000),)
    return Balance(
        duration_s=2.0, is_counted=True, loads=loads, gpus=("0000:1B:00.0",), matrix=moved_bytes_by_gpu_and_nic
    )


def test_balance_is_a_matrix_that_names_the_slow_nic() -> None:
    evidence: dict[str, object] = {"balance": serialization.to_json_data(make_balance())}
    record = make_record(case="a.py::test_balance", evidence=evidence)
    matrix = balance_matrix(make_facts(), [record], make_topology())
    assert matrix is not None
    assert matrix.rows == (("0000:1B:00.0", (("9.00 GB", "PIX"), ("1.00 GB", "SYS"))),)
    assert dict(matrix.totals)["Counted by the port"] == ("18.3 GB", "2.10 GB")
    assert dict(matrix.totals)["Share of all bytes"] == ("90.0 %", "10.0 %")
    assert matrix.slow_nics == {"mlx5_1"}
    # The record names no substrate, so the matrix says that the bytes may not describe hardware.
    assert matrix.caveat
    page_html = render_html(make_run(), make_facts(), [record])
    assert page_html.count('mlx5_1 <span class="state fail">slow</span>') == 1
    assert "by the port counters" in page_html


@pytest.mark.parametrize(
    "evidence", [{}, {"balance": "a text"}, {"balance": {"loads": []}}], ids=["none", "text", "part"]
)
def test_page_has_no_matrix_without_a_whole_balance(evidence: dict[str, object]) -> None:
    record = make_record(case="a.py::test_balance", evidence=evidence)
    assert balance_matrix(make_facts(), [record], None) is None
    assert 'id="balance"' not in render_html(make_run(), make_facts(), [record])


def test_measurement_has_value_unit_limit_and_source() -> None:
    facts = make_host_facts(gpu_count=1, nic_count=1)
    rows = measurements(make_host_records(facts), facts)
    assert [(row.group, row.quantity) for row in rows] == [
        ("Pinned copy", "host to device at 256 MiB"),
        ("Pinned copy", "device to host at 256 MiB"),
    ]
    assert (rows[0].value, rows[0].unit, rows[0].range_text) == ("55.0", "GB/s", "53.4 to 56.1")
    (bound,) = rows[0].bounds
    assert (bound.relation, bound.value, bound.is_met) == ("at most", "63.0", True)
    assert bound.source == "the link of GPU0, 32.0 GT/s PCIe x16"


def test_missed_expectation_is_marked_with_its_source() -> None:
    judged_check = {
        "number": "rate_gb_per_s_median",
        "found": 40.0,
        "bound": 49.5,
        "verdict": "fail",
        "text": "rate_gb_per_s_median is 40; expected 55, tolerance 10 % (measured on one H200)",
    }
    record = make_record(
        case="a.py::test_copy",
        numbers={"rate_gb_per_s_median": 40.0},
        substrate=HARDWARE_SUBSTRATES,
        evidence={"judged": [judged_check]},
    )
    (row,) = measurements([record], make_facts())
    (bound,) = row.bounds
    assert (bound.relation, bound.value, bound.is_met) == ("at least", "49.5", False)
    assert bound.source == "expected 55, tolerance 10 % (measured on one H200)"
    assert "at least 49.5 (not met)" in render_html(make_run(), make_facts(), [record])


def test_best_of_several_sizes_is_shown_for_rate_and_time() -> None:
    records = [
        make_record(
            case=f"a.py::test_a[{size}]",
            numbers={"rate_gb_per_s": rate, "wait_us_median": time_us},
            substrate=HARDWARE_SUBSTRATES,
        )
        for size, rate, time_us in (("1MiB", 5.0, 9.0), ("2MiB", 7.0, 12.0), ("4MiB", 6.0, 20.0))
    ]
    rows = {row.unit: (row.quantity, row.value) for row in measurements(records, make_facts())}
    assert rows == {"GB/s": ("at 2 MiB", "7.00"), "us": ("wait at 1 MiB", "9.00")}


def test_measurements_nearest_to_their_bounds_are_first() -> None:
    def make_judged_record(case: str, measured_value: float, bound: float, verdict: str) -> Record:
        check = {"number": "rate_gb_per_s", "bound": bound, "verdict": verdict, "text": "a; source"}
        numbers = {"rate_gb_per_s": measured_value, "wait_us": 3.0}
        return make_record(case=case, numbers=numbers, substrate=HARDWARE_SUBSTRATES, evidence={"judged": [check]})

    records = [
        make_record(case="a.py::test_free", numbers={"rate_gb_per_s": 99.0}, substrate=HARDWARE_SUBSTRATES),
        make_judged_record("a.py::test_far", 90.0, 30.0, "pass"),
        make_judged_record("a.py::test_near[a]", 60.0, 30.0, "pass"),
        make_judged_record("a.py::test_missed", 20.0, 30.0, "fail"),
        make_judged_record("a.py::test_near[b]", 31.0, 30.0, "pass"),
    ]
    rows = [(row.group, row.value) for row in measurements(records, make_facts())]
    assert rows[:4] == [("Missed", "20.0"), ("Near", "31.0"), ("Near", "60.0"), ("Far", "90.0")]
    # Rows without a bound remain in the order of the records.
    assert [group for group, _ in rows[4:]] == ["Free", "Far", "Near", "Near", "Missed"]


def test_page_has_findings_of_the_doctor_and_distances(tmp_path: Path) -> None:
    facts = make_host_facts(gpu_count=1, nic_count=1)
    run_folder = RunFolder(write_run(tmp_path / "run", facts, list(make_host_records(facts))))
    run_folder.topology.write_text(make_topology().to_json())
    diagnosis = diagnose(this_machine(query_apis=False, run_experiments=False))
    run_folder.diagnosis.write_text(diagnosis.to_json())
    page_html = render(run_folder.path).index.read_text()
    assert f"of {len(diagnosis.findings)} known causes" in page_html
    assert page_html.count("<code>gdrkit explain ") == len(diagnosis.findings_with(Verdict.FAIL))
    assert '<td class="pix">PIX</td>' in page_html
    # A run folder of gdrkit 0.1.0 has no topology.json and no doctor.json.
    run_folder.topology.unlink()
    run_folder.diagnosis.unlink()
    assert "known causes" not in render(run_folder.path).index.read_text()


@pytest.mark.parametrize("file_name", ["topology.json", "doctor.json"])
def test_damaged_document_of_the_machine_is_refused(tmp_path: Path, file_name: str) -> None:
    facts = make_host_facts(gpu_count=1, nic_count=1)
    run_path = write_run(tmp_path / "run", facts, [make_record()])
    (run_path / file_name).write_text('{"schema_version": 7}')
    with pytest.raises(UsageError, match=r"expected schema_version 1, found 7") as error_info:
        read_contents(run_path)
    assert error_info.value.reason is Reason.MALFORMED


def test_topology_survives_a_round_trip() -> None:
    topology_of_this_machine = topology(this_machine(query_apis=False, run_experiments=False))
    assert Topology.from_json(topology_of_this_machine.to_json()) == topology_of_this_machine


def test_folder_of_cases_is_folded_and_counts_its_verdicts() -> None:
    records = [make_record(case="a/x.py::test_a"), make_record(Verdict.FAIL, case="b/y.py::test_b")]
    page_html = render_html(make_run(), make_facts(), records)
    folders_and_verdicts = re.findall(
        r'<details class="suite">\s*<summary><code>(\w)</code>.*?class="(\w+)"><b>1</b>', page_html, re.DOTALL
    )
    assert folders_and_verdicts == [("a", "pass"), ("b", "fail")]


def test_failed_cases_of_several_pairs_are_one_cause() -> None:
    records = [
        make_record(
            Verdict.FAIL,
            case=f"a.py::test_write[{nic}]",
            routes=(ClaimedRoute(0, nic, "dmabuf"),),
            reasons=(CaseReason("wrong bytes"),),
        )
        for nic in ("mlx5_0", "mlx5_1")
    ]
    matrix = make_path_matrix(records)
    assert [(cause.text, cause.pair_count) for cause in matrix.causes] == [("a case of this path failed", 2)]
    ((_, _, cells),) = matrix.rows
    assert [cell and cell.case for cell in cells] == ["a.py::test_write[mlx5_0]", "a.py::test_write[mlx5_1]"]
