"""`nox -s peers` passes a program only if it ended well, printed its result and moved its bytes over the twin.

A twin is a library that emulates the hardware below an API.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.processes import is_gone, wait_until
from support.python_child import suites_environ
from support.records import make_record

from gdrkit.report import CaseReason, Verdict, append_record
from hardware.lab.errors import LabError
from hardware.peers import run as peers_runner
from hardware.peers.cuda_programs import list_cuda_programs
from hardware.peers.cuda_python import join_results
from hardware.peers.cuda_python_child import run_module as run_cuda_python_module
from hardware.peers.lab import Difference, compare
from hardware.peers.programs import StockProgram, list_debian_programs
from hardware.peers.rdma_core import RdmaCoreResults
from hardware.peers.run import DeviceUnderTest, run_program
from hardware.peers.speed import make_speed_record

# The arguments of DeviceUnderTest() are an RDMA device, an IP address that reaches it, and the index of its RoCE GID.
DEVICE_WITHOUT_TWINS = DeviceUnderTest("rxe0", "127.0.0.1", 1, timeout_s=20)
DEVICE_ON_TWINS = DeviceUnderTest(
    "twin0", "127.0.0.1", 1, (sys.executable, "-m", "gdrkit", "run", "--software"), timeout_s=60
)

# This program runs a client and a server that write their process IDs to files, and sleep.
RUN_SLEEPERS_PROGRAM = """
import sys
from hardware.peers.programs import StockProgram
from hardware.peers.run import DeviceUnderTest, run_program
sleepers = (("sh", "-c", f"echo $$ > {sys.argv[1]}/{role}; exec sleep 1000") for role in ("client", "server"))
run_program(StockProgram("sleepers", "a-package", *sleepers), DeviceUnderTest("rxe0", "127.0.0.1", 1, timeout_s=100))
"""


def make_program(client_script: str, server_script: str = "", **fields: object) -> StockProgram:
    """Return a program whose client and server are shell scripts. Without a server script, it has no server."""
    stock_program = StockProgram(
        "a program", "a-package", ("sh", "-c", client_script), ("sh", "-c", server_script) if server_script else ()
    )
    return dataclasses.replace(stock_program, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stock_program", "expected_failure"),
    [
        (make_program("echo done", output_pattern="^done$"), ""),
        (make_program("exit 3"), "the client ended with exit code 3"),
        (make_program("true", "exit 4"), "the server ended with exit code 4"),
        (make_program("echo no device; echo ------; exit 3"), "the client ended with exit code 3: no device"),
        (make_program("echo wrong", output_pattern="^done$"), "the output does not contain '^done$'"),
        (make_program("cp {folder}/source {folder}/copy", sent_file_bytes=1000), ""),
        (make_program("true", sent_file_bytes=1000), "the copied file differs from its source"),
    ],
)
def test_program_passes_only_with_code_output_and_data(stock_program: StockProgram, expected_failure: str) -> None:
    assert run_program(stock_program, DEVICE_WITHOUT_TWINS).failure == expected_failure


def test_program_that_hangs_is_killed() -> None:
    outcome = run_program(make_program("sleep 1000"), dataclasses.replace(DEVICE_WITHOUT_TWINS, timeout_s=1))
    assert outcome.failure == "the client did not end within 1 s"
    assert outcome.duration_s < 15


def test_program_with_a_longer_limit_is_not_killed_before() -> None:
    stock_program = make_program("sleep 2", timeout_s=15.0)
    assert run_program(stock_program, dataclasses.replace(DEVICE_WITHOUT_TWINS, timeout_s=1)).failure == ""


def test_programs_end_with_a_killed_runner(tmp_path: Path) -> None:
    """The programs have sessions of their own, so a signal to the group of the runner does not reach them."""
    with subprocess.Popen([sys.executable, "-c", RUN_SLEEPERS_PROGRAM, str(tmp_path)], env=suites_environ()) as runner:
        for role in ("server", "client"):
            wait_until(partial(has_line, tmp_path / role), f"the start of the {role}", timeout_s=60)
        runner.kill()
    for role in ("server", "client"):
        process_id = int((tmp_path / role).read_text())
        wait_until(partial(is_gone, process_id), f"the end of the {role}")


def has_line(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


def test_client_is_started_again_while_its_server_runs() -> None:
    stock_program = make_program("test -e {folder}/listens", "sleep 3; touch {folder}/listens; sleep 30")
    assert run_program(stock_program, DEVICE_WITHOUT_TWINS).failure == ""


def test_program_that_moves_no_bytes_over_the_twin_fails() -> None:
    outcome = run_program(make_program("true", moved_bytes_min=1), DEVICE_ON_TWINS)
    assert outcome.failure == "0 bytes moved over the twin, at least 1 were expected"


@pytest.mark.parametrize(
    ("client_script", "expected_failure"), [("true", ""), ("exit 3", "the client ended with exit code 3")]
)
def test_program_that_does_not_use_an_api_must_end_with_125(client_script: str, expected_failure: str) -> None:
    # `gdrkit run --require=verbs` ends with 125 if the program succeeds without a use of verbs.
    assert (
        run_program(make_program(client_script, expected_unused_api="verbs"), DEVICE_ON_TWINS).failure
        == expected_failure
    )


def test_command_of_a_record_has_no_path_of_this_tree() -> None:
    project_root = Path(peers_runner.__file__).resolve().parents[2]
    outcome = run_program(
        make_program(f"true {project_root}/noxfile.py; PYTHONPATH={project_root} true"), DEVICE_WITHOUT_TWINS
    )
    assert outcome.command == "sh -c 'true noxfile.py; PYTHONPATH=. true'"


def test_names_of_programs_are_unique() -> None:
    program_names = [
        stock_program.name for stock_program in [*list_debian_programs(), *list_cuda_programs(sys.executable)]
    ]
    assert len(program_names) == len(set(program_names))


def test_what_only_the_kernel_can_do_is_a_defect_of_the_twin(tmp_path: Path) -> None:
    twin_file, kernel_file = tmp_path / "twin.jsonl", tmp_path / "kernel.jsonl"
    failed_record = make_record(Verdict.FAIL, case="peers::kernel only", reasons=(CaseReason(text="a reason"),))
    twin_outcomes = {"tests.a": "pass", "tests.b": "skip: unsupported"}
    for path, record, outcomes in (
        (twin_file, failed_record, twin_outcomes),
        (kernel_file, make_record(case="peers::kernel only"), {**twin_outcomes, "tests.b": "pass"}),
    ):
        append_record(path, make_record(case="peers::both"))
        append_record(path, record)
        append_record(path, make_record(case="peers::rdma-core's tests", evidence={"tests": outcomes}))
    differences = compare(twin_file, kernel_file)
    assert differences == [
        Difference("kernel only", "a reason", "pass"),
        Difference("tests.b", "skip: unsupported", "pass"),
    ]
    assert all(difference.is_defect_of_twin for difference in differences)


def test_case_of_cuda_python_counts_only_without_kernels(tmp_path: Path) -> None:
    """A case that needs kernels, a compiler or the static runtime does not count, even if only its error shows that."""
    compiler_failure = "fail: call: nvrtc is hidden, so that no case compiles"
    runtime_failure = "fail: call: CUDAError: cudaErrorNotSupported: ..."
    # For each case: its outcome on the GPU, its outcome on the twin, and what it needs.
    results_by_case = {
        "m.py::both": ("pass", "pass", []),
        "m.py::twin_fails": ("pass", "fail: call: CUDA_ERROR_NOT_SUPPORTED", []),
        "m.py::twin_skips": ("pass", "skip: no such device", []),
        "m.py::kernel": ("pass", "pass", ["kernels"]),
        "m.py::compiles": ("pass", compiler_failure, []),
        "m.py::runtime": ("pass", runtime_failure, []),
        "m.py::gpu_fails": ("fail: call: 1", "fail: call: 2", []),
        "m.py::one_gpu": ("skip: two GPUs", "pass", []),
    }
    joined_results = join_results(*write_results(tmp_path, results_by_case))
    assert joined_results.counted_cases == {"m.py::both", "m.py::twin_fails", "m.py::twin_skips"}
    assert (
        joined_results.passed_count,
        round(joined_results.share_percent, 1),
        joined_results.cases_passing_only_on_twin,
    ) == (1, 33.3, [])
    assert joined_results.failure == "33.3 % of 3 cases pass, not 95 %"


def test_twin_that_is_kinder_than_a_gpu_fails(tmp_path: Path) -> None:
    joined_results = join_results(
        *write_results(tmp_path, {"m.py::a": ("pass", "pass", []), "m.py::b": ("fail: x", "pass", [])})
    )
    assert joined_results.failure == "1 case passes on the twin, but not on the GPU, such as m.py::b"


def test_module_of_cuda_python_goes_on_after_a_crash(tmp_path: Path) -> None:
    """After a crash, a new process runs the further cases. A case with Device.sync() needs the static runtime."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    module_path = tmp_path / "test_cases.py"
    crashing_case, syncing_case, last_case = (
        "def test_a(): os._exit(1)",
        "def test_b(): device.sync()",
        "def test_c(): stream.sync()",
    )
    imports = "import os\nfrom types import SimpleNamespace\ndevice = stream = SimpleNamespace(sync=int)"
    module_path.write_text(f"{imports}\n{crashing_case}\n{syncing_case}\n{last_case}\n")
    result_lines = run_cuda_python_module(tmp_path, module_path, tmp_path / "results.jsonl")
    outcome_and_needs_by_case = {
        result_line["test"].partition("::")[2]: (result_line["outcome"], result_line["needs"])
        for result_line in result_lines
    }
    assert outcome_and_needs_by_case == {
        "test_a": ("crash", []),
        "test_b": ("pass", ["static runtime"]),
        "test_c": ("pass", []),
    }


def write_results(folder: Path, results_by_case: dict[str, tuple[str, str, list[str]]]) -> list[Path]:
    """Write the results of both machines as cuda_python_child.py does, and return the files.

    The value of each case is its outcome on the GPU, its outcome on the twin, and what the case needs.
    """
    result_files = [folder / "gpu.jsonl", folder / "twin.jsonl"]
    for index, file in enumerate(result_files):
        lines: list[dict[str, object]] = [{"machine": {"device": file.stem}}]
        lines += [
            {"test": case, "outcome": case_results[index], "needs": case_results[2]}
            for case, case_results in results_by_case.items()
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return result_files


@pytest.mark.parametrize(
    ("test_name", "twin_outcome", "is_defect"),
    [
        ("tests.test_odp.OdpTestCase.test_odp_ud_traffic", "skip: ODP is not supported", False),
        ("tests.test_odp.OdpTestCase.test_odp_ud_traffic", "error", True),
        ("tests.test_qpex.QpExTestCase.test_qp_ex_rc_flush_type_violate", "skip: not supported", False),
        ("tests.test_qpex.QpExTestCase.test_qp_ex_rc_send", "skip: not supported", True),
    ],
)
def test_only_a_skipped_test_with_a_source_is_no_defect(test_name: str, twin_outcome: str, *, is_defect: bool) -> None:
    difference = Difference(test_name, twin_outcome, "pass")
    assert difference.is_defect_of_twin is is_defect
    assert bool(difference.absence_reason) is not is_defect


def test_kernel_that_ran_no_tests_of_rdma_core_is_an_error(tmp_path: Path) -> None:
    twin_file, kernel_file = tmp_path / "twin.jsonl", tmp_path / "kernel.jsonl"
    case_name = "peers::rdma-core's tests"
    append_record(twin_file, make_record(case=case_name, evidence={"tests": {"tests.a": "pass"}}))
    append_record(
        kernel_file, make_record(Verdict.FAIL, case=case_name, evidence={"tests": {}, "output": "ImportError"})
    )
    with pytest.raises(LabError, match=r"did not run on the kernel of kernel\.jsonl: ImportError"):
        compare(twin_file, kernel_file)


@pytest.mark.parametrize(
    ("metric", "measured_value", "expected_reason"),
    [
        ("ib_write_lat_us", 0.6, ""),
        ("ib_write_lat_us", 0.61, "ib_write_lat_us / ucx_tcp_tag_lat_us <= 0.6 does not hold: 0.61"),
        ("ib_read_bw_gbps", 0.79, "ib_read_bw_gbps / memcpy_gbps >= 0.8 does not hold: 0.79"),
        ("ucx_verbs_put_bw_gbps", 1.9, "ucx_verbs_put_bw_gbps / ucx_tcp_put_bw_gbps >= 2 does not hold: 1.90"),
    ],
)
def test_speed_passes_only_within_its_limits(metric: str, measured_value: float, expected_reason: str) -> None:
    metric_names = ("ucx_tcp_tag_lat_us", "memcpy_gbps", "ib_write_bw_gbps", "ib_read_bw_gbps", "ucx_tcp_put_bw_gbps")
    values_by_metric = {name: [1.0, 9.0, 1.0] for name in metric_names}
    values_by_metric |= {"ib_write_lat_us": [0.5] * 3, "ucx_verbs_put_bw_gbps": [2.0] * 3, metric: [measured_value] * 3}
    record = make_speed_record(values_by_metric, load=(0.0, 0.0), duration_s=1.0)
    assert "; ".join(reason.text for reason in record.reasons) == expected_reason
    assert (record.verdict is Verdict.PASS) == (not expected_reason)


def test_skipped_tests_are_counted_whatever_their_reason() -> None:
    results = RdmaCoreResults({"a": "pass", "b": "skip: no device memory", "c": "error: X: y"}, 0, "")
    assert [results.count(outcome) for outcome in ("pass", "skip", "fail", "error")] == [1, 1, 0, 1]
