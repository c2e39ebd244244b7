"""What records amount to: substrate, routes, exit code. Pure, on facts and records that the case writes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from support.records import DRIVER, EVIDENCE, NIC, TWIN, facts_of, facts_of_hardware, library, record_of, route

from gdrkit.errors import Reason
from gdrkit.evidence import DeviceNode, KernelEvidence
from gdrkit.inventory import ApiFailure, ForeseenAbsence, Profile
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
    weakest,
)
from gdrkit.report.substrate import substrates_of_facts

if TYPE_CHECKING:
    from gdrkit.inventory import Facts
    from gdrkit.report import Record

HARDWARE = {"verbs": "hardware", "cuda": "hardware"}
ANY = Profile(schema_version=1, name="any", about="", foreseen=(ForeseenAbsence("*", "*"),), routes=(RequiredRoute(),))
BARE = Profile(schema_version=1, name="bare", about="", cases_min=2)
REAL = [library("libibverbs.so.1"), library("libcuda.so.1")]
CARRIED = ClaimedRoute(0, "mlx5_0", "dmabuf")


WHOLE = facts_of_hardware()
CUFILE = library("libcufile.so.0")


def with_nic(**fields: object) -> Facts:
    """Hardware, but for what netlink and ioctl say of its NIC."""
    (nic,) = EVIDENCE.rdma
    changed = dataclasses.replace(nic, **fields)  # type: ignore[arg-type]
    return facts_of_hardware(evidence=dataclasses.replace(EVIDENCE, rdma=(changed,)))


def with_gpu(**fields: object) -> Facts:
    """Hardware, but for what the NVIDIA driver says of its GPU."""
    (gpu,) = EVIDENCE.gpus
    changed = dataclasses.replace(gpu, **fields)  # type: ignore[arg-type]
    return facts_of_hardware(evidence=dataclasses.replace(EVIDENCE, gpus=(changed,)))


@pytest.mark.parametrize(
    ("libraries", "facts", "expected"),
    [
        ([*REAL, CUFILE], WHOLE, {"verbs": "hardware", "cuda": "hardware", "cufile": "hardware"}),
        ([TWIN, REAL[1]], WHOLE, {"verbs": "twin", "cuda": "hardware"}),
        ([library("libc.so.6")], WHOLE, {}),
        ([library("libibverbs.so.1", error="cut off")], WHOLE, {"verbs": "unknown"}),
        # A twin and a library that is none, in either order.
        ([TWIN, REAL[0]], WHOLE, {"verbs": "unknown"}),
        ([REAL[0], TWIN], WHOLE, {"verbs": "unknown"}),
        # Files say that the devices are there, and the kernel was not asked.
        (REAL, facts_of(rdma=[NIC], driver=DRIVER), {"verbs": "unknown", "cuda": "unknown"}),
        (REAL, facts_of_hardware(evidence=None), {"verbs": "unknown", "cuda": "unknown"}),
        # The kernel was asked, and has nothing.
        (REAL, facts_of_hardware(evidence=KernelEvidence()), {"verbs": "unknown", "cuda": "unknown"}),
        # The devices are real, and the library had none of them open.
        (REAL, facts_of_hardware(cuda_open=False), {"verbs": "hardware", "cuda": "unknown"}),
        (REAL, facts_of_hardware(verbs_open=False), {"verbs": "unknown", "cuda": "hardware"}),
        (REAL[:1], with_nic(name="mlx5_1"), {"verbs": "unknown"}),
        (REAL[:1], with_nic(missing=("its node is another",)), {"verbs": "unknown"}),
        (REAL[:1], with_nic(driver=None), {"verbs": "unknown"}),
        (REAL[:1], with_nic(pci_driver=None), {"verbs": "unknown"}),
        (REAL[:1], with_nic(node=None), {"verbs": "unknown"}),
        # rxe and siw have no PCI function, whatever sysfs shows.
        (REAL[:1], with_nic(driver="rxe", pci_driver=None, pci_address=None), {"verbs": "kernel_software"}),
        (REAL[:1], with_nic(driver="siw"), {"verbs": "kernel_software"}),
        (REAL[1:], with_gpu(missing=("its driver is another",)), {"cuda": "unknown"}),
        (REAL[1:], with_gpu(pci_address="0000:99:00.0"), {"cuda": "unknown"}),
        (
            REAL[1:],
            facts_of_hardware(evidence=dataclasses.replace(EVIDENCE, nvidia_missing=("versions differ",))),
            {"cuda": "unknown"},
        ),
        ([library("libhl-thunk.so")], WHOLE, {"hlthunk": "unknown"}),
        # A damaged file has no SONAME; its name says which API it was.
        ([library("libcuda.so.580.159.04", error="cut off")], WHOLE, {"cuda": "unknown"}),
        ([REAL[1], library("libcuda.so.1", error="cut off")], WHOLE, {"cuda": "unknown"}),
        ([library("libcufile.so.1.15.1", error="cut off")], WHOLE, {"cufile": "unknown"}),
        ([library("libhl-thunk.so", error="cut off")], WHOLE, {"hlthunk": "unknown"}),
        ([library("libhlthunk.so", error="cut off")], WHOLE, {"hlthunk": "unknown"}),
        ([library("libcudart.so.12", error="cut off")], WHOLE, {}),
        # A whole file without a SONAME is no library of an API, whatever its file name is.
        ([dataclasses.replace(REAL[1], soname=None)], WHOLE, {}),
        ([dataclasses.replace(REAL[0], soname="libother.so.1")], WHOLE, {}),
    ],
    ids=range(30),
)
def test_the_substrate_is_judged_by_what_was_loaded_and_what_the_kernel_shows(
    libraries: list[object], facts: Facts, expected: dict[str, str]
) -> None:
    judged = substrate_of(libraries, facts)  # type: ignore[arg-type]
    assert {api: found.value for api, found in judged.items()} == expected


def test_a_nic_that_the_kernel_does_not_show_proves_nothing() -> None:
    assert substrate_of(REAL[:1], WHOLE, nics=["mlx5_0"]) == {"verbs": Substrate.HARDWARE}
    assert substrate_of(REAL[:1], WHOLE, nics=["mlx5_9"]) == {"verbs": Substrate.UNKNOWN}
    assert substrate_of(REAL[:1], WHOLE, nics=["mlx5_0", "mlx5_9"]) == {"verbs": Substrate.UNKNOWN}


def test_substrate_of_facts_has_the_apis_that_answered() -> None:
    assert WHOLE.cuda is not None
    answered = dataclasses.replace(WHOLE, cuda=dataclasses.replace(WHOLE.cuda, libraries=(REAL[1],)))
    assert substrates_of_facts(answered) == {"cuda": Substrate.HARDWARE}
    assert substrates_of_facts(WHOLE) == {}


def test_open_devices_of_a_process_outweigh_those_of_facts() -> None:
    assert substrate_of(REAL, WHOLE, nodes=()) == dict.fromkeys(("verbs", "cuda"), Substrate.UNKNOWN)
    alone = dataclasses.replace(WHOLE, cuda=None)
    assert substrate_of(REAL[1:], alone) == {"cuda": Substrate.UNKNOWN}
    assert substrate_of(REAL[1:], alone, nodes=[DeviceNode("/dev/nvidia0", 195, 0)]) == {"cuda": Substrate.HARDWARE}
    assert substrate_of(REAL[1:], alone, nodes=[DeviceNode("/dev/null", 1, 3)]) == {"cuda": Substrate.UNKNOWN}


def test_a_chain_is_as_weak_as_its_weakest_part() -> None:
    assert weakest([Substrate.HARDWARE, Substrate.TWIN, Substrate.KERNEL_SOFTWARE]) is Substrate.TWIN
    assert weakest([]) is Substrate.UNKNOWN


@pytest.mark.parametrize(
    ("record", "state", "cause"),
    [
        (record_of(routes=(CARRIED,), substrate=HARDWARE), RouteOutcome.PROVEN, ""),
        (
            record_of(routes=(CARRIED,), substrate={"verbs": "twin", "cuda": "twin"}),
            RouteOutcome.UNPROVEN,
            "ran on software twins",
        ),
        (
            record_of(routes=(CARRIED,), substrate={"verbs": "kernel_software", "cuda": "hardware"}),
            RouteOutcome.UNPROVEN,
            "verbs ran on software in the kernel",
        ),
        (
            record_of(routes=(CARRIED,), substrate={"verbs": "hardware"}),
            RouteOutcome.UNPROVEN,
            "the substrate of cuda is unknown",
        ),
        (
            record_of(
                Verdict.UNPROVEN, reasons=(CaseReason("no counter moved"),), routes=(CARRIED,), substrate=HARDWARE
            ),
            RouteOutcome.UNPROVEN,
            "no counter moved",
        ),
        (
            record_of(Verdict.FAIL, reasons=(CaseReason("differs"),), routes=(CARRIED,), substrate=HARDWARE),
            RouteOutcome.UNPROVEN,
            "failed: suite/test_a.py::test_a",
        ),
        (
            record_of(routes=(dataclasses.replace(CARRIED, fell_back="through the host"),), substrate=HARDWARE),
            RouteOutcome.FELL_BACK,
            "through the host (suite/test_a.py::test_a)",
        ),
    ],
)
def test_a_route_is_proven_only_by_a_pass_on_hardware(record: Record, state: RouteOutcome, cause: str) -> None:
    (status,) = route_statuses(facts_of(), [record])
    assert (status.state, status.cause) == (state, cause)
    assert status.name == "GPU 0 <- NIC mlx5_0 by dma-buf"


def test_one_failure_outweighs_a_pass() -> None:
    passed = record_of(routes=(CARRIED,), substrate=HARDWARE)
    failed = record_of(Verdict.FAIL, reasons=(CaseReason("x"),), routes=(CARRIED,), substrate=HARDWARE, case="b.py::t")
    (status,) = route_statuses(facts_of(), [passed, failed])
    assert (status.state, status.cases) == (RouteOutcome.UNPROVEN, ("suite/test_a.py::test_a", "b.py::t"))


def test_a_route_that_registration_refuses_is_not_possible_and_says_why() -> None:
    refused, allowed = route_statuses(facts_of(routes=[route("peer_memory", possible=False), route("dmabuf")]), [])[
        ::-1
    ]
    cause = "ibv_reg_mr failed: Bad address (EFAULT); load a module"
    assert (refused.state, refused.cause) == (RouteOutcome.NOT_POSSIBLE, cause)
    assert (allowed.state, allowed.cause) == (RouteOutcome.UNPROVEN, "no case used this route")


def test_a_way_without_a_word_of_its_own_keeps_its_name() -> None:
    assert route_name(3, "mlx5_1", "carrier pigeon") == "GPU 3 <- NIC mlx5_1 by carrier pigeon"


FAILURE = ApiFailure(
    api="loader",
    operation="dlopen libcuda.so.1",
    status=2,
    status_name="ENOENT",
    errno=2,
    reason=Reason.LIBRARY_MISSING,
    message="loader: dlopen libcuda.so.1() failed: No such file or directory (ENOENT)",
    what_to_do="install the driver",
)
PASSED = record_of(substrate=HARDWARE)
PROVEN = record_of(routes=(CARRIED,), substrate=HARDWARE)
FAILED = record_of(Verdict.FAIL, reasons=(CaseReason("differs"),))
MISSED = record_of(Verdict.NOT_RUN, reasons=(CaseReason("none", need="cuda.vmm", foreseen=False),))
FORESEEN = record_of(Verdict.NOT_RUN, reasons=(CaseReason("none", need="cuda.vmm", foreseen=True),))
FALLEN = record_of(routes=(dataclasses.replace(CARRIED, fell_back="through the host"),), substrate=HARDWARE)
OTHER_ROUTE = facts_of(routes=[route("peer_memory")])


@pytest.mark.parametrize(
    ("profile", "records", "facts", "software", "code", "verdict"),
    [
        (ANY, [PROVEN], facts_of(), False, 0, "Every required route is proven on hardware"),
        (BARE, [PASSED, PASSED], facts_of(), True, 0, "The code passed on software twins"),
        (BARE, [PASSED, PASSED, FORESEEN], facts_of(), True, 0, "The code passed on software twins"),
        (BARE, [PASSED, FAILED], facts_of(), True, 1, "1 of 2 cases failed"),
        (ANY, [PROVEN, FAILED], facts_of(), False, 1, "1 of 2 cases failed"),
        (ANY, [FALLEN], facts_of(), False, 1, "A route fell back where direct was required"),
        (BARE, [FALLEN, PASSED], facts_of(), False, 4, "Nothing was proven on hardware"),
        (
            BARE,
            [PASSED, PASSED, MISSED],
            facts_of(),
            True,
            1,
            "1 case did not run, and profile bare does not foresee that",
        ),
        (BARE, [PASSED], facts_of(), True, 1, "Only 1 case ran, profile bare wants 2"),
        (BARE, [FORESEEN, FORESEEN], facts_of(), True, 1, "Only 0 cases ran, profile bare wants 2"),
        (ANY, [PROVEN], OTHER_ROUTE, False, 1, "1 required route not proven"),
        (ANY, [PROVEN], facts_of(failure=FAILURE), False, 3, "The set-up of this machine is not complete"),
        (ANY, [FAILED], facts_of(failure=FAILURE), False, 1, "1 of 1 case failed"),
        (ANY, [PASSED], facts_of(), False, 4, "Nothing was proven on hardware"),
        (
            ANY,
            [PASSED],
            facts_of(failure=dataclasses.replace(FAILURE, reason=Reason.NO_DEVICE)),
            False,
            4,
            "Nothing was",
        ),
    ],
)
def test_the_exit_code_follows_from_the_records(
    profile: Profile, records: list[Record], facts: Facts, *, software: bool, code: int, verdict: str
) -> None:
    outcome = decide(facts, profile, records, software_asked=software)
    assert outcome.code is ExitCode(code)
    assert outcome.verdict.startswith(verdict)
    assert outcome.causes or outcome.code is ExitCode.PROVEN or outcome.verdict.startswith("Only")


def test_for_each_device_one_route_may_be_enough() -> None:
    enough = dataclasses.replace(ANY, routes=(RequiredRoute(enough="device"),))
    assert decide(OTHER_ROUTE, enough, [PROVEN], software_asked=False).code is ExitCode.PROVEN
    second = facts_of(routes=[dataclasses.replace(route("dmabuf"), device_index=1)])
    outcome = decide(second, enough, [PROVEN], software_asked=False)
    assert outcome.causes == ("no route to GPU 1 is proven",)


def test_missing_set_up_says_what_to_do() -> None:
    outcome = decide(facts_of(failure=FAILURE), ANY, [PASSED], software_asked=False)
    assert outcome.to_do == ("install the driver",)


def test_a_part_of_the_cases_need_not_be_many() -> None:
    assert decide(facts_of(), BARE, [PASSED], software_asked=True, is_part=True).code is ExitCode.PROVEN
    assert decide(facts_of(), BARE, [], software_asked=True, is_part=True).code is ExitCode.FAILED
