"""The HTML page of a run has failures with remedies, routes, a drawing, plots, and the hardware that cases need."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import pytest
from support.hosts import HARDWARE_SUBSTRATES, make_host_facts, make_host_records
from support.records import TWIN_LIBRARY, make_facts, make_library, make_record, make_run

from gdrkit.report import CaseReason, ClaimedFile, ClaimedRoute, SeenLibrary, Verdict
from gdrkit.report.drawing import make_drawing
from gdrkit.report.failures import describe_failures, failures
from gdrkit.report.figure import make_plot
from gdrkit.report.limits import link_limit
from gdrkit.report.render import render_html, render_markdown
from gdrkit.report.routes import RouteOutcome, file_statuses, route_statuses
from gdrkit.report.sweep import parse_number_name, sweeps
from gdrkit.report.unproven import unproven_cases

if TYPE_CHECKING:
    from gdrkit.report import Record


def render_page(records: list[Record]) -> str:
    return render_html(make_run(), make_facts(), records)


def test_every_link_of_the_page_has_a_target() -> None:
    facts = make_host_facts(gpu_count=8, nic_count=8)
    page_html = render_html(make_run(), facts, list(make_host_records(facts)))
    element_ids = set(re.findall(r' id="([^"]+)"', page_html))
    links = re.findall(r' href="#([^"]+)"', page_html)
    assert len(links) > 100
    assert set(links) <= element_ids


def test_overview_has_a_key_of_its_symbols() -> None:
    facts = make_host_facts(gpu_count=1, nic_count=1)
    page_html = render_html(make_run(), facts, list(make_host_records(facts)))
    (legend,) = re.findall(r'<p class="states">(.*?)</p>', page_html)
    assert re.findall(r'<span class="state (\w+)">', legend) == [state.value for state in RouteOutcome]
    assert "None: this machine has no pair of a GPU and a NIC or mount." in render_page([make_record()])


def test_page_of_64_routes_is_below_1_mb() -> None:
    facts = make_host_facts(gpu_count=8, nic_count=8)
    records = list(make_host_records(facts))
    assert len(route_statuses(facts, records)) == 64
    assert len(render_html(make_run(), facts, records).encode()) < 1_000_000


def test_failure_has_its_remedy_and_a_link_to_its_record() -> None:
    reason = CaseReason("VerbsError: ibv_reg_mr failed: Bad address (EFAULT). To do: load nvidia-peermem")
    page_html = render_page([make_record(), make_record(Verdict.FAIL, case="a.py::test_b", reasons=(reason,))])
    (failures_html,) = re.findall(r'<ol class="failures">.*?</ol>', page_html, re.DOTALL)
    assert "ibv_reg_mr failed: Bad address (EFAULT)</p>" in failures_html
    assert "To do:</span> load nvidia-peermem" in failures_html
    assert '<a href="#r1">a.py::test_b</a>' in failures_html


def test_failures_with_one_cause_are_merged() -> None:
    reason = CaseReason("no memory")
    failed_records = [
        make_record(Verdict.FAIL, case=f"a.py::test_{case_index}", reasons=(reason,)) for case_index in range(7)
    ]
    page_html = render_page(failed_records)
    assert page_html.count('<p class="what">') == 1
    # The page lists five of the seven cases.
    assert "and 2 more" in page_html
    assert "gdrkit qualify -k test_0 --seed 1" in page_html


def test_terminal_has_one_line_for_each_cause() -> None:
    reasons = (CaseReason("ibv_reg_mr failed: Bad address (EFAULT). To do: load nvidia-peermem"),)
    failed_records = [
        make_record(Verdict.FAIL, case=f"a.py::test_{case_index}", reasons=reasons) for case_index in range(3)
    ]
    other_record = make_record(Verdict.FAIL, case="b.py::test_c", reasons=(CaseReason("wrong\nbytes"),))
    remedy = "read the traceback of the case in the report, then run the case alone: gdrkit qualify -k test_c --seed 1"
    assert describe_failures(make_facts(), [make_record(), *failed_records, other_record]) == (
        "FAIL ibv_reg_mr failed: Bad address (EFAULT) (a.py::test_0 and 2 more). To do: load nvidia-peermem",
        f"FAIL wrong bytes (b.py::test_c). To do: {remedy}",
    )
    assert describe_failures(make_facts(), [make_record()]) == ()


def test_fallback_has_a_link_to_the_case_that_detected_it() -> None:
    cause_text = "by the host. To do: load nvidia-peermem"
    records = [
        make_record(
            case=f"a.py::test_{name}",
            routes=(ClaimedRoute(0, "mlx5_0", "dmabuf", cause),),
            files=(ClaimedFile(0, "/data", "posix", cause),),
            substrate={**HARDWARE_SUBSTRATES, "cufile": "hardware"},
        )
        for name, cause in (("direct", None), ("first", cause_text), ("second", cause_text))
    ]
    routes, files = route_statuses(make_facts(), records), file_statuses(make_facts(), records)
    (failure,) = failures(make_facts(), records, routes, files)
    assert (failure.cause, failure.remedy) == ("by the host", "load nvidia-peermem")
    # One case detected the fallback of the registration route and the fallback of the file route.
    assert failure.cases == ("a.py::test_first", "a.py::test_first")
    (failures_html,) = re.findall(r'<ol class="failures">.*?</ol>', render_page(records), re.DOTALL)
    assert '<a href="#r1">GPU 0 &lt;- NIC mlx5_0 by dma-buf</a>' in failures_html
    assert '<a href="#r0">' not in failures_html


def test_page_without_failures_has_no_such_section() -> None:
    assert "Failures" not in render_page([make_record()])


@pytest.mark.parametrize(
    ("route", "fallback_cause", "substrate", "expected_state"),
    [
        ("nvfs", None, {"cuda": "hardware", "cufile": "hardware"}, "proven"),
        ("nvfs", None, {"cuda": "hardware", "cufile": "twin"}, "unproven"),
        ("engine", None, {"cuda": "hardware", "cufile": "hardware"}, "unproven"),
        ("posix", "no O_DIRECT", {"cuda": "hardware", "cufile": "hardware"}, "fell_back"),
        ("engine", "no nvidia-fs", {"cuda": "hardware"}, "fell_back"),
        ("engine", "no nvidia-fs", {"cuda": "twin"}, "unproven"),
    ],
)
def test_mount_is_proven_only_by_a_direct_route_on_hardware(
    route: str, fallback_cause: str | None, substrate: dict[str, str], expected_state: str
) -> None:
    record = make_record(files=(ClaimedFile(0, "/data", route, fallback_cause),), substrate=substrate)
    (status,) = file_statuses(make_facts(), [record])
    assert status.state.value == expected_state
    assert bool(status.cause) is (expected_state != "proven")
    assert f"GPU 0 &lt;- files of /data by {route}" in render_page([record])


def test_summary_has_mounts_without_a_nic() -> None:
    record = make_record(files=(ClaimedFile(0, "/data", "nvfs"),), substrate={"cuda": "hardware", "cufile": "hardware"})
    assert "| GPU 0 <- files of /data by nvfs | proven |  |" in render_markdown(make_run(), make_facts(), [record])


def test_api_that_only_cases_used_has_a_substrate() -> None:
    twin_library = SeenLibrary.of("case", make_library("libcufile.so.0", notes=TWIN_LIBRARY.notes))
    records = [
        make_record(substrate={"cufile": "hardware"}),
        make_record(case="a.py::test_a", substrate={"cufile": "twin"}, libraries=(twin_library,)),
        make_record(case="a.py::test_b", substrate={"hlthunk": "hardware"}),
    ]
    summary = render_markdown(make_run(), make_facts(), records)
    # Two cases used cuFile, one on hardware and one on the twin. The summary shows the weaker substrate.
    assert "| cufile | software twin | /usr/lib/libcufile.so.0 | ab12 |" in summary
    assert "| hlthunk | hardware | none |  |" in summary
    assert "cufile" not in render_markdown(make_run(), make_facts(), [make_record(substrate={"cuda": "hardware"})])


def test_drawing_has_every_device_and_every_pair() -> None:
    facts = make_host_facts(gpu_count=8, nic_count=8)
    drawing = make_drawing(facts, route_statuses(facts, list(make_host_records(facts))))
    assert drawing is not None
    assert [frame.label for frame in drawing.frames] == ["NUMA node 0", "NUMA node 1"]
    assert (len(drawing.boxes), len(drawing.links)) == (16, 64)
    for box in drawing.boxes:
        frame = drawing.frames[box.device.numa_node or 0]
        assert frame.y < box.y
        assert box.y + drawing.box_height <= frame.y + frame.height
    assert drawing.links[-1].state == "fell_back"


def test_host_without_devices_is_not_drawn() -> None:
    assert make_drawing(make_facts(), ()) is None


def test_plot_of_a_sweep_has_values_and_limit() -> None:
    facts = make_host_facts(gpu_count=1, nic_count=1)
    (sweep,) = sweeps(make_host_records(facts), facts)
    assert [(line.name, line.is_bound, round(line.points[0].value, 3)) for line in sweep.lines] == [
        ("host to device", False, 13.75),
        ("device to host", False, 13.375),
        ("limit of the link", True, 63.015),
    ]
    plot = make_plot(sweep)
    first_curve = plot.curves[0]
    assert (first_curve.marks[0].x, first_curve.marks[-1].x) == (plot.left, plot.right)
    assert [row[0] for row in plot.rows] == ["64 KiB", "1 MiB", "16 MiB", "256 MiB"]
    # A row has the size, and for each curve the value and its case.
    assert plot.rows[-1][1][0][0] == "55"
    # The axis begins at 0, and every mark is inside the plot.
    assert plot.y_ticks[0].position_px == plot.bottom
    assert all(plot.top <= mark.highest_y <= mark.y <= mark.lowest_y <= plot.bottom for mark in first_curve.marks)


def test_numbers_by_depth_have_a_separate_plot() -> None:
    numbers = {f"depth_{depth}_gb_per_s_median": depth / 2 for depth in (1, 4, 16)}
    case = "rdma.py::test_by_depth[write-dmabuf]"
    (sweep,) = sweeps([make_record(case=case, numbers=numbers, substrate=HARDWARE_SUBSTRATES)], make_facts())
    (line,) = sweep.lines
    assert (sweep.x_axis, line.name) == ("depth", "write dmabuf")
    assert [(point.size_or_depth, point.value) for point in line.points] == [(1, 0.5), (4, 2.0), (16, 8.0)]
    assert [row[0] for row in make_plot(sweep).rows] == ["1", "4", "16"]


# In each parameter set, the size or depth is 0 or too large, or the rate is too large, too small or negative. The
# braces stand for a direction.
@pytest.mark.parametrize(
    ("case_template", "numbers"),
    [
        ("a.py::test_a[{}-0B]", {"rate_gb_per_s_median": 1.0}),
        ("a.py::test_a[{}-0GiB]", {"rate_gb_per_s_median": 1.0}),
        ("a.py::test_a[{}]", {"depth_0_gb_per_s_median": 1.0, "depth_00_gb_per_s_median": 1.0}),
        ("a.py::test_a[" + "9" * 5000 + "GiB-{}]", {"rate_gb_per_s_median": 1.0}),
        ("a.py::test_a[{}-1MiB]", {"rate_gb_per_s_median": 1.7e308}),
        ("a.py::test_a[{}-1MiB]", {"rate_gb_per_s_median": 5e-324}),
        ("a.py::test_a[{}-1MiB]", {"rate_gb_per_s_median": -1.0}),
    ],
)
def test_point_that_no_axis_can_show_is_left_out(case_template: str, numbers: dict[str, float]) -> None:
    cases = [case_template.format(direction) for direction in ("read", "write")]
    odd_records = [make_record(case=case, numbers=numbers, substrate=HARDWARE_SUBSTRATES) for case in cases]
    valid_records = [
        make_record(case=f"a.py::test_a[{size}]", numbers={"rate_gb_per_s_median": 2.0}, substrate=HARDWARE_SUBSTRATES)
        for size in ("1MiB", "2MiB")
    ]
    (sweep,) = sweeps([*odd_records, *valid_records], make_facts())
    assert [[point.size_or_depth for point in line.points] for line in sweep.lines] == [[1 << 20, 2 << 20]]
    assert len(make_plot(sweep).rows) == 2


def test_bound_that_no_axis_can_show_is_left_out() -> None:
    checks = [{"number": "rate_gb_per_s_median", "bound": bound} for bound in (10**400, -(10**400), 1e308, True, "1")]
    numbers = {"rate_gb_per_s_median": 2.0, "rate_gb_per_s_min": -1.0, "rate_gb_per_s_max": 1.7e308}
    records = [
        make_record(
            case=f"a.py::test_a[{size}]", numbers=numbers, substrate=HARDWARE_SUBSTRATES, evidence={"judged": checks}
        )
        for size in ("1MiB", "2MiB")
    ]
    (sweep,) = sweeps(records, make_facts())
    (line,) = sweep.lines
    assert [(point.lowest, point.highest) for point in line.points] == [(None, None)] * 2
    assert [tick.label for tick in make_plot(sweep).y_ticks] == ["0", "0.5", "1", "1.5", "2"]


def test_bounds_of_a_case_are_drawn() -> None:
    def make_measured_record(size: str, measured_apis: list[str]) -> Record:
        checks = [{"number": "rate_gb_per_s_median", "bound": bound} for bound in (50.0, 63.0)]
        return make_record(
            case=f"a.py::test_a[{size}]",
            numbers={"rate_gb_per_s_median": 55.0},
            substrate={"cuda": "hardware", "verbs": "twin"},
            evidence={
                "judged": [*checks, {"number": "other", "bound": 1.0}, "foreign"],
                "measured_apis": measured_apis,
            },
        )

    (sweep,) = sweeps([make_measured_record(size, ["cuda"]) for size in ("1MiB", "2MiB")], make_facts())
    assert [(line.name, line.is_bound, line.points[0].value) for line in sweep.lines] == [
        ("GB/s", False, 55.0),
        ("at least", True, 50.0),
        ("at most", True, 63.0),
    ]
    # If the numbers also measure the twin of verbs, they do not describe hardware.
    assert sweeps([make_measured_record(size, ["cuda", "verbs"]) for size in ("1MiB", "2MiB")], make_facts()) == ()


def test_limit_of_a_route_is_its_slower_link() -> None:
    facts = make_host_facts(gpu_count=1, nic_count=1)
    record_with_route = make_record(routes=(ClaimedRoute(0, "mlx5_0", "dmabuf"),))
    limit = link_limit(record_with_route, facts)
    assert limit is not None
    assert (limit.gb_per_s, limit.source) == (50.0, "the port of mlx5_0, 400 Gb/sec (4X NDR)")
    assert link_limit(make_record(), facts) is None
    assert link_limit(record_with_route, make_facts()) is None
    limit_of_copy = link_limit(make_record(case="a.py::test_copy[host_to_device-1MiB]"), facts)
    assert limit_of_copy is not None
    assert limit_of_copy.gb_per_s == pytest.approx(63.0, abs=0.1)
    # In a virtual machine, sysfs may show other link speeds than the hardware has, so the limit is unknown.
    facts_of_virtual_machine = dataclasses.replace(facts, virtual_machine="kvm")
    assert link_limit(record_with_route, facts_of_virtual_machine) is None


def test_copy_with_several_devices_has_no_link_limit() -> None:
    case = "test_all_devices.py::test_pinned_copies_of_all_devices[host_to_device]"
    record = make_record(case=case, evidence={"numa_nodes": {"GPU0": 0, "GPU1": None}})
    assert link_limit(record, make_host_facts(gpu_count=2, nic_count=1)) is None


def test_numbers_of_software_have_no_plot() -> None:
    numbers = {"rate_gb_per_s_median": 3.0}
    cases = [f"a.py::test_a[{size}]" for size in ("1MiB", "2MiB")]
    # `uses` has the APIs that the numbers of a case describe. If it is empty, they describe all APIs of the substrate.
    for substrate, uses, plot_count in (
        (HARDWARE_SUBSTRATES, (), 1),
        ({"cuda": "hardware", "verbs": "twin"}, (), 0),
        ({"cuda": "hardware", "verbs": "twin"}, ("cuda",), 1),
        ({"cuda": "hardware", "verbs": "twin"}, ("cuda", "verbs"), 0),
        ({}, ("cuda",), 0),
    ):
        records = [make_record(case=case, numbers=numbers, substrate=substrate, uses=uses) for case in cases]
        assert len(sweeps(records, make_facts())) == plot_count, (substrate, uses)


# The last part is 1 if more is better, -1 if less is better, and 0 if neither is.
@pytest.mark.parametrize(
    ("name", "expected_parts"),
    [
        ("rate_gb_per_s_median", ("rate", "gb_per_s", "median", 1)),
        ("latency_us_p99", ("latency", "us", "p99", -1)),
        ("read_s_per_gib", ("read", "s_per_gib", "", -1)),
        ("direct_over_by_host_ratio", ("direct_over_by_host", "ratio", "", 0)),
        ("rounds_count", ("rounds", "count", "", 0)),
    ],
)
def test_name_of_a_number_has_unit_and_better_direction(name: str, expected_parts: tuple[str, str, str, int]) -> None:
    parts = parse_number_name(name)
    assert (parts.base, parts.unit, parts.statistic, parts.better_sign) == expected_parts


def test_unproven_cases_name_the_needed_hardware() -> None:
    substrate = {"verbs": "twin", "cuda": "twin", "hlthunk": "twin"}
    records = [
        make_record(substrate=substrate, uses=("cuda", "verbs")),
        make_record(Verdict.NOT_RUN, reasons=(CaseReason("2 needed", need="cuda.device(count_min=2)", foreseen=True),)),
    ]
    *_, throughput_group = unproven_cases(records)
    groups = {group.need_or_api: (group.needed, group.ran, len(group.cases)) for group in unproven_cases(records)}
    assert groups == {
        "cuda.device(count_min=2)": ("that many NVIDIA GPUs in one host, with their driver", False, 1),
        "cuda": ("an NVIDIA GPU with its driver", True, 1),
        "verbs": ("an RDMA NIC with an active port", True, 1),
        "throughput": (throughput_group.needed, False, 0),
    }
    measured_record = make_record(numbers={"rate_gb_per_s": 1.0}, substrate=HARDWARE_SUBSTRATES)
    assert [group.need_or_api for group in unproven_cases([measured_record])] == []
    for document in (render_page(records), render_markdown(make_run(), make_facts(), records)):
        assert "an RDMA NIC with an active port" in document
