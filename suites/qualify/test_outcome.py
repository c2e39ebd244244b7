"""The outcome of a qualification: substrates, route states and the exit code follow from facts and records.

The cases construct the facts and records. A substrate is the layer below an API: hardware, software in the kernel, a
twin (a library that emulates the hardware), or unknown.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from support.records import (
    DRIVER_VERSION,
    KERNEL_EVIDENCE,
    NIC,
    TWIN_LIBRARY,
    make_facts,
    make_hardware_facts,
    make_library,
    make_proven_route,
    make_record,
    make_route_facts,
)

from gdrkit.errors import Reason
from gdrkit.evidence import DeviceNode, KernelEvidence
from gdrkit.host import PortFacts
from gdrkit.inventory import ApiFailure, ExpectedLink, ForeseenAbsence, Profile
from gdrkit.inventory.profile import RequiredRoute
from gdrkit.qualify import ExitCode, decide
from gdrkit.report import (
    CaseReason,
    ClaimedRoute,
    RouteOutcome,
    Substrate,
    Verdict,
    route_name,
    route_statuses,
    substrate_of,
    weakest_substrate,
)
from gdrkit.report.substrate import substrates_of_facts

if TYPE_CHECKING:
    from gdrkit.inventory import Facts
    from gdrkit.report import Record

HARDWARE_SUBSTRATES = {"verbs": "hardware", "cuda": "hardware"}
# This profile foresees every unmet need, and requires every route of the machine.
ANY_PROFILE = Profile(
    schema_version=1, name="any", about="", foreseen=(ForeseenAbsence("*", "*"),), routes=(RequiredRoute(),)
)
TWO_CASES_PROFILE = Profile(schema_version=1, name="bare", about="", cases_min=2)
VERBS_LIBRARY, CUDA_LIBRARY = make_library("libibverbs.so.1"), make_library("libcuda.so.1")
VENDOR_LIBRARIES = [VERBS_LIBRARY, CUDA_LIBRARY]
DIRECT_ROUTE = make_proven_route(0, "mlx5_0")

HARDWARE_FACTS = make_hardware_facts()
CUFILE_LIBRARY = make_library("libcufile.so.0")


def make_facts_with_nic(**fields: object) -> Facts:
    """Return facts of a machine with hardware, with `fields` replaced in the kernel's evidence for the NIC."""
    (nic_evidence,) = KERNEL_EVIDENCE.rdma
    changed_nic = dataclasses.replace(nic_evidence, **fields)  # type: ignore[arg-type]
    return make_hardware_facts(evidence=dataclasses.replace(KERNEL_EVIDENCE, rdma=(changed_nic,)))


def make_facts_with_gpu(**fields: object) -> Facts:
    """Return facts of a machine with hardware, with `fields` replaced in the kernel's evidence for the GPU."""
    (gpu_evidence,) = KERNEL_EVIDENCE.gpus
    changed_gpu = dataclasses.replace(gpu_evidence, **fields)  # type: ignore[arg-type]
    return make_hardware_facts(evidence=dataclasses.replace(KERNEL_EVIDENCE, gpus=(changed_gpu,)))


@pytest.mark.parametrize(
    ("libraries", "facts", "expected_substrates"),
    [
        (
            [*VENDOR_LIBRARIES, CUFILE_LIBRARY],
            HARDWARE_FACTS,
            {"verbs": "hardware", "cuda": "hardware", "cufile": "hardware"},
        ),
        ([TWIN_LIBRARY, CUDA_LIBRARY], HARDWARE_FACTS, {"verbs": "twin", "cuda": "hardware"}),
        ([make_library("libc.so.6")], HARDWARE_FACTS, {}),
        ([make_library("libibverbs.so.1", error="cut off")], HARDWARE_FACTS, {"verbs": "unknown"}),
        # The process has loaded a twin and a library of the vendor.
        ([TWIN_LIBRARY, VERBS_LIBRARY], HARDWARE_FACTS, {"verbs": "unknown"}),
        ([VERBS_LIBRARY, TWIN_LIBRARY], HARDWARE_FACTS, {"verbs": "unknown"}),
        # The facts contain the devices, but no evidence of the kernel for them.
        (
            VENDOR_LIBRARIES,
            make_facts(rdma_devices=[NIC], driver_version=DRIVER_VERSION),
            {"verbs": "unknown", "cuda": "unknown"},
        ),
        (VENDOR_LIBRARIES, make_hardware_facts(evidence=None), {"verbs": "unknown", "cuda": "unknown"}),
        # The kernel reports neither a GPU nor a NIC.
        (VENDOR_LIBRARIES, make_hardware_facts(evidence=KernelEvidence()), {"verbs": "unknown", "cuda": "unknown"}),
        # The devices exist, but the process has not opened the device nodes of one API.
        (VENDOR_LIBRARIES, make_hardware_facts(is_cuda_open=False), {"verbs": "hardware", "cuda": "unknown"}),
        (VENDOR_LIBRARIES, make_hardware_facts(is_verbs_open=False), {"verbs": "unknown", "cuda": "hardware"}),
        ([VERBS_LIBRARY], make_facts_with_nic(name="mlx5_1"), {"verbs": "unknown"}),
        (
            [VERBS_LIBRARY],
            make_facts_with_nic(missing=("the device node is of another NIC",)),
            {"verbs": "unknown"},
        ),
        ([VERBS_LIBRARY], make_facts_with_nic(driver=None), {"verbs": "unknown"}),
        ([VERBS_LIBRARY], make_facts_with_nic(pci_driver=None), {"verbs": "unknown"}),
        ([VERBS_LIBRARY], make_facts_with_nic(node=None), {"verbs": "unknown"}),
        # rxe and siw are software in the kernel, even if sysfs shows a PCI function.
        (
            [VERBS_LIBRARY],
            make_facts_with_nic(driver="rxe", pci_driver=None, pci_address=None),
            {"verbs": "kernel_software"},
        ),
        ([VERBS_LIBRARY], make_facts_with_nic(driver="siw"), {"verbs": "kernel_software"}),
        ([CUDA_LIBRARY], make_facts_with_gpu(missing=("the driver is not nvidia",)), {"cuda": "unknown"}),
        ([CUDA_LIBRARY], make_facts_with_gpu(pci_address="0000:99:00.0"), {"cuda": "unknown"}),
        (
            [CUDA_LIBRARY],
            make_hardware_facts(evidence=dataclasses.replace(KERNEL_EVIDENCE, nvidia_missing=("versions differ",))),
            {"cuda": "unknown"},
        ),
        ([make_library("libhl-thunk.so")], HARDWARE_FACTS, {"hlthunk": "unknown"}),
        # A damaged file has no SONAME, so its file name determines the API.
        ([make_library("libcuda.so.580.159.04", error="cut off")], HARDWARE_FACTS, {"cuda": "unknown"}),
        ([CUDA_LIBRARY, make_library("libcuda.so.1", error="cut off")], HARDWARE_FACTS, {"cuda": "unknown"}),
        ([make_library("libcufile.so.1.15.1", error="cut off")], HARDWARE_FACTS, {"cufile": "unknown"}),
        ([make_library("libhl-thunk.so", error="cut off")], HARDWARE_FACTS, {"hlthunk": "unknown"}),
        ([make_library("libhlthunk.so", error="cut off")], HARDWARE_FACTS, {"hlthunk": "unknown"}),
        ([make_library("libcudart.so.12", error="cut off")], HARDWARE_FACTS, {}),
        # An intact file without a SONAME or with another SONAME is not a library of an API, whatever its file name is.
        ([dataclasses.replace(CUDA_LIBRARY, soname=None)], HARDWARE_FACTS, {}),
        ([dataclasses.replace(VERBS_LIBRARY, soname="libother.so.1")], HARDWARE_FACTS, {}),
    ],
    ids=range(30),
)
def test_substrate_follows_from_libraries_and_kernel_evidence(
    libraries: list[object], facts: Facts, expected_substrates: dict[str, str]
) -> None:
    substrates = substrate_of(libraries, facts)  # type: ignore[arg-type]
    assert {api: substrate.value for api, substrate in substrates.items()} == expected_substrates


def test_substrate_of_a_nic_unknown_to_the_kernel_is_unknown() -> None:
    assert substrate_of([VERBS_LIBRARY], HARDWARE_FACTS, used_nics=["mlx5_0"]) == {"verbs": Substrate.HARDWARE}
    assert substrate_of([VERBS_LIBRARY], HARDWARE_FACTS, used_nics=["mlx5_9"]) == {"verbs": Substrate.UNKNOWN}
    assert substrate_of([VERBS_LIBRARY], HARDWARE_FACTS, used_nics=["mlx5_0", "mlx5_9"]) == {"verbs": Substrate.UNKNOWN}


def test_substrate_of_facts_has_the_apis_with_libraries() -> None:
    assert HARDWARE_FACTS.cuda is not None
    facts_with_cuda = dataclasses.replace(
        HARDWARE_FACTS, cuda=dataclasses.replace(HARDWARE_FACTS.cuda, libraries=(CUDA_LIBRARY,))
    )
    assert substrates_of_facts(facts_with_cuda) == {"cuda": Substrate.HARDWARE}
    assert substrates_of_facts(HARDWARE_FACTS) == {}


def test_given_device_nodes_override_nodes_of_facts() -> None:
    assert substrate_of(VENDOR_LIBRARIES, HARDWARE_FACTS, open_nodes=()) == dict.fromkeys(
        ("verbs", "cuda"), Substrate.UNKNOWN
    )
    # A device node has a path, a major and a minor number. The major number of NVIDIA devices is 195.
    facts_without_cuda = dataclasses.replace(HARDWARE_FACTS, cuda=None)
    assert substrate_of([CUDA_LIBRARY], facts_without_cuda) == {"cuda": Substrate.UNKNOWN}
    assert substrate_of([CUDA_LIBRARY], facts_without_cuda, open_nodes=[DeviceNode("/dev/nvidia0", 195, 0)]) == {
        "cuda": Substrate.HARDWARE
    }
    assert substrate_of([CUDA_LIBRARY], facts_without_cuda, open_nodes=[DeviceNode("/dev/null", 1, 3)]) == {
        "cuda": Substrate.UNKNOWN
    }


def test_without_verbs_facts_every_nic_of_the_kernel_counts() -> None:
    (nic,) = KERNEL_EVIDENCE.rdma
    assert nic.node is not None
    software_nic = dataclasses.replace(nic, name="rxe0", driver="rxe")
    for rdma_devices, expected_substrate in (
        ((nic,), Substrate.HARDWARE),
        ((nic, software_nic), Substrate.KERNEL_SOFTWARE),
    ):
        kernel_evidence = dataclasses.replace(KERNEL_EVIDENCE, rdma=rdma_devices)
        facts = dataclasses.replace(make_hardware_facts(evidence=kernel_evidence), verbs=None)
        assert substrate_of([VERBS_LIBRARY], facts, open_nodes=[nic.node]) == {"verbs": expected_substrate}


def test_combined_substrate_is_the_weakest() -> None:
    assert weakest_substrate([Substrate.HARDWARE, Substrate.TWIN, Substrate.KERNEL_SOFTWARE]) is Substrate.TWIN
    assert weakest_substrate([]) is Substrate.UNKNOWN


@pytest.mark.parametrize(
    ("record", "expected_state", "expected_cause"),
    [
        (make_record(routes=(DIRECT_ROUTE,), substrate=HARDWARE_SUBSTRATES), RouteOutcome.PROVEN, ""),
        (
            make_record(routes=(DIRECT_ROUTE,), substrate={"verbs": "twin", "cuda": "twin"}),
            RouteOutcome.UNPROVEN,
            "ran on software twins",
        ),
        (
            make_record(routes=(DIRECT_ROUTE,), substrate={"verbs": "kernel_software", "cuda": "hardware"}),
            RouteOutcome.UNPROVEN,
            "verbs ran on software in the kernel",
        ),
        (
            make_record(routes=(DIRECT_ROUTE,), substrate={"verbs": "hardware"}),
            RouteOutcome.UNPROVEN,
            "the substrate of cuda is unknown",
        ),
        (
            make_record(
                Verdict.UNPROVEN,
                reasons=(CaseReason("no counter moved"),),
                routes=(DIRECT_ROUTE,),
                substrate=HARDWARE_SUBSTRATES,
            ),
            RouteOutcome.UNPROVEN,
            "no counter moved",
        ),
        (
            make_record(
                Verdict.FAIL, reasons=(CaseReason("differs"),), routes=(DIRECT_ROUTE,), substrate=HARDWARE_SUBSTRATES
            ),
            RouteOutcome.UNPROVEN,
            "failed: suite/test_a.py::test_a",
        ),
        (
            make_record(routes=(ClaimedRoute(0, "mlx5_0", "dmabuf"),), substrate=HARDWARE_SUBSTRATES),
            RouteOutcome.UNPROVEN,
            "no case compared the port counters with the bytes (counters_not_read)",
        ),
        (
            make_record(
                routes=(dataclasses.replace(DIRECT_ROUTE, path="loopback", unproven="loopback_not_counted"),),
                substrate=HARDWARE_SUBSTRATES,
            ),
            RouteOutcome.UNPROVEN,
            "the bytes stayed inside one NIC, which does not count them (loopback_not_counted)",
        ),
        (
            make_record(
                routes=(dataclasses.replace(DIRECT_ROUTE, fell_back="through the host"),), substrate=HARDWARE_SUBSTRATES
            ),
            RouteOutcome.FELL_BACK,
            "through the host (suite/test_a.py::test_a)",
        ),
    ],
)
def test_route_is_proven_only_by_a_case_that_passed_on_hardware(
    record: Record, expected_state: RouteOutcome, expected_cause: str
) -> None:
    (status,) = route_statuses(make_facts(), [record])
    assert (status.state, status.cause) == (expected_state, expected_cause)
    assert status.name == "GPU 0 <- NIC mlx5_0 by dma-buf"


def test_path_of_a_route_is_wire_if_a_passed_case_used_two_nics() -> None:
    loopback_route = dataclasses.replace(DIRECT_ROUTE, path="loopback", unproven="loopback_not_counted")
    records = [
        make_record(case=f"a.py::test_{index}", routes=(claimed_route,), substrate=HARDWARE_SUBSTRATES)
        for index, claimed_route in enumerate([ClaimedRoute(0, "mlx5_0", "dmabuf"), loopback_route, DIRECT_ROUTE])
    ]
    statuses = [route_statuses(make_facts(), records[:record_count])[0] for record_count in (1, 2, 3)]
    assert [status.path for status in statuses] == ["", "loopback", "wire"]
    assert [status.state for status in statuses] == [RouteOutcome.UNPROVEN, RouteOutcome.UNPROVEN, RouteOutcome.PROVEN]
    assert "loopback_not_counted" in statuses[1].cause


def test_failed_case_outweighs_a_passed_one() -> None:
    passed_record = make_record(routes=(DIRECT_ROUTE,), substrate=HARDWARE_SUBSTRATES)
    failed_record = make_record(
        Verdict.FAIL, reasons=(CaseReason("x"),), routes=(DIRECT_ROUTE,), substrate=HARDWARE_SUBSTRATES, case="b.py::t"
    )
    (status,) = route_statuses(make_facts(), [passed_record, failed_record])
    assert (status.state, status.cases) == (RouteOutcome.UNPROVEN, ("suite/test_a.py::test_a", "b.py::t"))


def test_route_that_registration_refuses_is_not_possible() -> None:
    possible_route, refused_route = route_statuses(
        make_facts(routes=[make_route_facts("peer_memory", is_possible=False), make_route_facts("dmabuf")]), []
    )
    cause = "ibv_reg_mr failed: Bad address (EFAULT); load a module"
    assert (refused_route.state, refused_route.cause) == (RouteOutcome.NOT_POSSIBLE, cause)
    assert (possible_route.state, possible_route.cause) == (RouteOutcome.UNPROVEN, "no case used this route")


def test_unknown_registration_method_keeps_its_name() -> None:
    assert route_name(3, "mlx5_1", "carrier pigeon") == "GPU 3 <- NIC mlx5_1 by carrier pigeon"


API_FAILURE = ApiFailure(
    api="loader",
    operation="dlopen libcuda.so.1",
    status=2,
    status_name="ENOENT",
    errno=2,
    reason=Reason.LIBRARY_MISSING,
    message="loader: dlopen libcuda.so.1() failed: No such file or directory (ENOENT)",
    what_to_do="install the driver",
)
PASSED_RECORD = make_record(substrate=HARDWARE_SUBSTRATES)
PROVEN_RECORD = make_record(routes=(DIRECT_ROUTE,), substrate=HARDWARE_SUBSTRATES)
FAILED_RECORD = make_record(Verdict.FAIL, reasons=(CaseReason("differs"),))
UNFORESEEN_RECORD = make_record(Verdict.NOT_RUN, reasons=(CaseReason("none", need="cuda.vmm", foreseen=False),))
FORESEEN_RECORD = make_record(Verdict.NOT_RUN, reasons=(CaseReason("none", need="cuda.vmm", foreseen=True),))
FALLBACK_RECORD = make_record(
    routes=(dataclasses.replace(DIRECT_ROUTE, fell_back="through the host"),), substrate=HARDWARE_SUBSTRATES
)
FACTS_WITH_PEER_MEMORY = make_facts(routes=[make_route_facts("peer_memory")])


@pytest.mark.parametrize(
    ("profile", "records", "facts", "is_software_run", "exit_code", "verdict_beginning"),
    [
        (ANY_PROFILE, [PROVEN_RECORD], make_facts(), False, 0, "Every required route is proven on hardware"),
        (TWO_CASES_PROFILE, [PASSED_RECORD, PASSED_RECORD], make_facts(), True, 0, "The code passed on software twins"),
        (
            TWO_CASES_PROFILE,
            [PASSED_RECORD, PASSED_RECORD, FORESEEN_RECORD],
            make_facts(),
            True,
            0,
            "The code passed on software twins",
        ),
        (TWO_CASES_PROFILE, [PASSED_RECORD, FAILED_RECORD], make_facts(), True, 1, "1 of 2 cases failed"),
        (ANY_PROFILE, [PROVEN_RECORD, FAILED_RECORD], make_facts(), False, 1, "1 of 2 cases failed"),
        (
            ANY_PROFILE,
            [FALLBACK_RECORD],
            make_facts(),
            False,
            1,
            "A route fell back where a direct transfer was required",
        ),
        (TWO_CASES_PROFILE, [FALLBACK_RECORD, PASSED_RECORD], make_facts(), False, 4, "Nothing was proven on hardware"),
        (
            TWO_CASES_PROFILE,
            [PASSED_RECORD, PASSED_RECORD, UNFORESEEN_RECORD],
            make_facts(),
            True,
            1,
            "1 case did not run, and profile bare does not foresee that",
        ),
        (TWO_CASES_PROFILE, [PASSED_RECORD], make_facts(), True, 1, "Only 1 case ran; profile bare requires 2"),
        (
            TWO_CASES_PROFILE,
            [FORESEEN_RECORD, FORESEEN_RECORD],
            make_facts(),
            True,
            1,
            "Only 0 cases ran; profile bare requires 2",
        ),
        (ANY_PROFILE, [PROVEN_RECORD], FACTS_WITH_PEER_MEMORY, False, 1, "1 required route not proven"),
        (
            ANY_PROFILE,
            [PROVEN_RECORD],
            make_facts(cuda_failure=API_FAILURE),
            False,
            3,
            "The set-up of this machine is not complete",
        ),
        (ANY_PROFILE, [FAILED_RECORD], make_facts(cuda_failure=API_FAILURE), False, 1, "1 of 1 case failed"),
        (ANY_PROFILE, [PASSED_RECORD], make_facts(), False, 4, "Nothing was proven on hardware"),
        (
            ANY_PROFILE,
            [PASSED_RECORD],
            make_facts(cuda_failure=dataclasses.replace(API_FAILURE, reason=Reason.NO_DEVICE)),
            False,
            4,
            "Nothing was",
        ),
    ],
)
def test_exit_code_follows_from_the_records(
    profile: Profile,
    records: list[Record],
    facts: Facts,
    *,
    is_software_run: bool,
    exit_code: int,
    verdict_beginning: str,
) -> None:
    outcome = decide(facts, profile, records, uses_only_twins=is_software_run)
    assert outcome.code is ExitCode(exit_code)
    assert outcome.verdict.startswith(verdict_beginning)
    # If too few cases ran, the verdict ("Only ... ran") is the whole explanation, and the outcome has no causes.
    assert outcome.causes or outcome.code is ExitCode.PROVEN or outcome.verdict.startswith("Only")


def test_profile_may_require_one_route_for_each_device() -> None:
    profile = dataclasses.replace(ANY_PROFILE, routes=(RequiredRoute(enough="device"),))
    assert decide(FACTS_WITH_PEER_MEMORY, profile, [PROVEN_RECORD], uses_only_twins=False).code is ExitCode.PROVEN
    facts_with_gpu_1 = make_facts(routes=[dataclasses.replace(make_route_facts("dmabuf"), device_index=1)])
    outcome = decide(facts_with_gpu_1, profile, [PROVEN_RECORD], uses_only_twins=False)
    assert outcome.causes == ("no route to GPU 1 is proven",)


def test_incomplete_setup_repeats_the_advice_of_its_api() -> None:
    outcome = decide(make_facts(cuda_failure=API_FAILURE), ANY_PROFILE, [PASSED_RECORD], uses_only_twins=False)
    assert outcome.to_do == ("install the driver",)


def test_selected_cases_need_not_reach_the_minimum() -> None:
    assert (
        decide(make_facts(), TWO_CASES_PROFILE, [PASSED_RECORD], uses_only_twins=True, is_part=True).code
        is ExitCode.PROVEN
    )
    assert decide(make_facts(), TWO_CASES_PROFILE, [], uses_only_twins=True, is_part=True).code is ExitCode.FAILED


def test_slow_link_fails_a_machine_with_proven_routes() -> None:
    port = PortFacts(1, "ACTIVE", "LinkUp", "400 Gb/sec (4X NDR)", "InfiniBand")
    facts = dataclasses.replace(HARDWARE_FACTS, rdma_devices=(dataclasses.replace(NIC, ports=(port,)),))
    expected_links = (ExpectedLink("nic_gbit_per_s", 400, 1, "https://example.com"),)
    profile = dataclasses.replace(ANY_PROFILE, links=expected_links)
    assert decide(facts, profile, [PROVEN_RECORD], uses_only_twins=False).code is ExitCode.PROVEN
    profile_with_faster_link = dataclasses.replace(
        profile, links=(dataclasses.replace(expected_links[0], at_least=800),)
    )
    outcome = decide(facts, profile_with_faster_link, [PROVEN_RECORD], uses_only_twins=False)
    assert (outcome.code, outcome.verdict) == (ExitCode.FAILED, "The links differ from the links in profile any")
    assert outcome.causes[0].startswith("nic_gbit_per_s: 0 of 1 have 800 (mlx5_0 port 1 has 400)")
    assert outcome.to_do
