"""Expected refusals: a profile can list the errors with which registrations fail on a machine that lacks a need.

A case with such an unmet need runs all the same. If it ends with exactly these errors, its verdict is `not_run`, else
`fail`. A child pytest runs the cases in CASES on the facts of a machine with Soft-RoCE, for which the profile `lab` was
made. A fault plan makes the verbs twin (a library that emulates the hardware) return the errors of the Soft-RoCE
driver, or other errors.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from qualify.child_pytest import ChildRun, run_cases
from support.json_schema import NEEDS_JSONSCHEMA, find_violations
from support.records import make_record

from gdrkit.errors import Api, Reason, UsageError
from gdrkit.evidence import KernelEvidence, RdmaEvidence
from gdrkit.harness.needs import cuda, needs, software, verbs
from gdrkit.host import RdmaDevice
from gdrkit.inventory import load_profile
from gdrkit.report import CaseReason, Verdict
from gdrkit.serialization import to_json_data

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.inventory import Facts

pytestmark = needs(software(Api.VERBS), software(Api.CUDA), verbs.nic(), cuda.device(), cuda.dmabuf_export)

CASES = '''
"""Cases whose registration must be refused."""
import contextlib, errno, os
import pytest
from gdrkit import launch
from gdrkit.errors import Api, Reason, RegistrationFailed, Unsupported
from gdrkit.harness.needs import cuda, host, needs, verbs
from gdrkit.registration import GdrManager, RegionCache, RegistrationRoute, register

NEEDS_REGISTRATION = needs(verbs.nic(), verbs.dmabuf_region, cuda.device())
LEAKED_PIPES = []

@contextlib.contextmanager
def failing_registrations(dmabuf_errno="EOPNOTSUPP", address_errno="EFAULT"):
    rules = ["gdrkit-faults 1"]
    for function, errno_name in (("ibv_reg_dmabuf_mr", dmabuf_errno), ("ibv_reg_mr", address_errno)):
        rules += [f"{function} call=* errno={errno_name}"] if errno_name else []
    launch.twin_control().set_faults("verbs", "\\n".join([*rules, ""]))
    try:
        yield
    finally:
        launch.twin_control().set_faults("verbs", "gdrkit-faults 1\\n")

def make_cause(operation, error_number, api=Api.VERBS):
    error_name = errno.errorcode[error_number]
    return Unsupported(
        api=api, operation=operation, status=error_number, status_name=error_name, errno=error_number
    )

def fail_registration(*causes, reason=Reason.NO_ROUTE):
    raise RegistrationFailed("refusal", causes=causes, reason=reason)

DMABUF_CAUSE = make_cause("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP)
ADDRESS_CAUSE = make_cause("ibv_reg_mr", errno.EFAULT)

@NEEDS_REGISTRATION
def test_register(device, nic, evidence):
    evidence["key"] = 1
    evidence.number("write_us", 1)
    evidence.route(device=device, nic=nic, method="dmabuf")
    with failing_registrations(), device.allocate(4096) as memory:
        register(memory, [nic])

@needs(verbs.nic(), verbs.peer_memory, cuda.device())
def test_lease_of_a_cache(device, nic):
    with failing_registrations(), device.allocate(4096) as memory, RegionCache([nic]) as cache:
        cache.lease(memory)

@NEEDS_REGISTRATION
def test_manager_of_every_gpu():
    with failing_registrations(), GdrManager() as manager:
        manager.device(0)

@pytest.fixture
def registration(device, nic):
    with failing_registrations(), device.allocate(4096) as memory, register(memory, [nic]) as registered:
        yield registered

@NEEDS_REGISTRATION
def test_register_in_a_fixture(registration):
    raise AssertionError("must not run")

@NEEDS_REGISTRATION
def test_passes(device, nic):
    with device.allocate(4096) as memory:
        register(memory, [nic]).close()

@NEEDS_REGISTRATION
def test_does_nothing(): ...

@NEEDS_REGISTRATION
def test_another_errno_of_ibv_reg_dmabuf_mr(device, nic):
    with failing_registrations(dmabuf_errno="EPROTONOSUPPORT"), device.allocate(4096) as memory:
        register(memory, [nic])

@NEEDS_REGISTRATION
def test_another_errno_of_ibv_reg_mr(device, nic):
    with failing_registrations(address_errno="EOPNOTSUPP"), device.allocate(4096) as memory:
        register(memory, [nic])

@NEEDS_REGISTRATION
def test_refusal_of_dmabuf_alone(device, nic):
    with failing_registrations(), device.allocate(4096) as memory:
        register(memory, [nic], route=RegistrationRoute.DMABUF)

@NEEDS_REGISTRATION
def test_refusal_of_peer_memory_alone(device, nic):
    with failing_registrations(), device.allocate(4096) as memory:
        register(memory, [nic], route=RegistrationRoute.PEER_MEMORY)

@NEEDS_REGISTRATION
def test_error_without_a_second_route(device, nic):
    with failing_registrations(dmabuf_errno="ENOMEM"), device.allocate(4096) as memory:
        register(memory, [nic])

@NEEDS_REGISTRATION
def test_three_causes():
    fail_registration(DMABUF_CAUSE, ADDRESS_CAUSE, ADDRESS_CAUSE)

@NEEDS_REGISTRATION
def test_causes_in_reverse_order():
    fail_registration(ADDRESS_CAUSE, DMABUF_CAUSE)

@NEEDS_REGISTRATION
def test_another_operation():
    fail_registration(DMABUF_CAUSE, make_cause("ibv_open_device", errno.EFAULT))

@NEEDS_REGISTRATION
def test_another_api():
    fail_registration(DMABUF_CAUSE, make_cause("ibv_reg_mr", errno.EFAULT, api=Api.CUDA))

@NEEDS_REGISTRATION
def test_another_reason():
    fail_registration(DMABUF_CAUSE, ADDRESS_CAUSE, reason=Reason.OTHER)

@NEEDS_REGISTRATION
def test_one_of_two_devices_has_one_cause():
    complete_failure = RegistrationFailed("refusal", causes=(DMABUF_CAUSE, ADDRESS_CAUSE), reason=Reason.NO_ROUTE)
    incomplete_failure = RegistrationFailed("refusal", causes=(DMABUF_CAUSE,), reason=Reason.NO_ROUTE)
    fail_registration(complete_failure, incomplete_failure)

@NEEDS_REGISTRATION
def test_cause_without_registration_failed():
    raise DMABUF_CAUSE

@NEEDS_REGISTRATION
def test_assertion():
    assert False, "ibv_reg_dmabuf_mr EOPNOTSUPP ibv_reg_mr EFAULT"

@NEEDS_REGISTRATION
def test_skips_itself():
    pytest.skip("ibv_reg_dmabuf_mr EOPNOTSUPP ibv_reg_mr EFAULT")

@NEEDS_REGISTRATION
def test_leaks_after_the_refusal(device, nic):
    LEAKED_PIPES.append(os.pipe())
    with failing_registrations(), device.allocate(4096) as memory:
        register(memory, [nic])

@pytest.fixture
def failing_tear_down():
    yield
    raise RuntimeError("the tear-down fails")

@NEEDS_REGISTRATION
def test_tear_down_fails_after_the_refusal(failing_tear_down):
    fail_registration(DMABUF_CAUSE, ADDRESS_CAUSE)

@NEEDS_REGISTRATION
@needs(host.module("there_is_no_such_module"))
def test_lacks_another_need_as_well():
    raise AssertionError("must not run")

@needs(verbs.nic())
def test_lacks_no_need_and_is_refused():
    fail_registration(DMABUF_CAUSE, ADDRESS_CAUSE)

@needs(verbs.nic())
def test_lacks_no_need(): ...
'''
REFUSED_CASES = ("test_register", "test_lease_of_a_cache", "test_manager_of_every_gpu", "test_register_in_a_fixture")
RECORDED_CAUSES = [
    {"api": "verbs", "operation": "ibv_reg_dmabuf_mr", "status": 95, "status_name": "EOPNOTSUPP", "errno": 95},
    {"api": "verbs", "operation": "ibv_reg_mr", "status": 14, "status_name": "EFAULT", "errno": 14},
]


def make_soft_roce_facts(facts: Facts) -> Facts:
    """Return a copy of `facts` in which all NICs are Soft-RoCE devices, whose driver is rxe."""
    assert facts.verbs is not None
    libraries = tuple(replace(library, notes=()) for library in facts.verbs.libraries)
    nics = tuple(replace(nic, dmabuf=False) for nic in facts.verbs.nics)
    devices = tuple(
        RdmaDevice(
            name=nic.name,
            driver="rxe",
            has_device=False,
            node_guid=nic.node_guid,
            firmware=None,
            pci_address=None,
            numa_node=None,
            ports=(),
        )
        for nic in nics
    )
    routes = tuple(replace(route, possible=False) for route in facts.routes)
    evidence = KernelEvidence(
        rdma=tuple(
            RdmaEvidence(
                name=nic.name,
                node_guid=nic.node_guid,
                driver="rxe",
                node=None,
                pci_address=None,
                pci_driver=None,
                missing=(),
            )
            for nic in nics
        )
    )
    return replace(
        facts,
        verbs=replace(facts.verbs, libraries=libraries, nics=nics),
        rdma_devices=devices,
        routes=routes,
        evidence=evidence,
    )


@pytest.fixture(scope="module")
def child_run(tmp_path_factory: pytest.TempPathFactory, facts: Facts) -> ChildRun:
    """Run all cases in CASES once with the profile `lab`, and return the run."""
    return run_cases(
        tmp_path_factory.mktemp("refusals"), make_soft_roce_facts(facts), CASES, "--seed=11", "--profile=lab"
    )


@pytest.mark.parametrize("case_name", REFUSED_CASES)
def test_expected_refusal_is_recorded_as_not_run(child_run: ChildRun, case_name: str) -> None:
    record = child_run.records[case_name]
    assert (record.verdict, record.is_expected_refusal, record.is_failure) == (Verdict.NOT_RUN, True, False)
    recorded_refusals = record.evidence["refused"]
    assert isinstance(recorded_refusals, list)
    assert recorded_refusals == [{"reason": "no_route", "causes": RECORDED_CAUSES}] * len(recorded_refusals)
    # The manager tries each of the two NICs for each of the two GPUs.
    assert len(recorded_refusals) == (4 if case_name == "test_manager_of_every_gpu" else 1)
    # The first reason names the unmet need, and the second reason names the errors of the registration.
    assert record.reasons[0].need in {"verbs.dmabuf_region", "verbs.peer_memory"}
    assert "failed: EOPNOTSUPP (95), ibv_reg_mr failed: EFAULT (14)" in record.reasons[1].text
    assert all(reason.foreseen for reason in record.reasons)
    # The case has run, so the record has the libraries. It has no routes and numbers, because its verdict is not_run.
    assert record.libraries
    assert (record.routes, record.numbers) == ((), {})


@NEEDS_JSONSCHEMA
@pytest.mark.parametrize("case_name", REFUSED_CASES)
def test_record_of_a_refusal_conforms_to_the_schema(child_run: ChildRun, case_name: str) -> None:
    assert find_violations("record-1.json", json.loads(json.dumps(to_json_data(child_run.records[case_name])))) == []


@pytest.mark.parametrize(
    ("case_name", "expected_text"),
    [
        ("test_passes", "nothing was refused"),
        ("test_does_nothing", "nothing was refused"),
        ("test_another_errno_of_ibv_reg_dmabuf_mr", "EPROTONOSUPPORT"),
        ("test_another_errno_of_ibv_reg_mr", "RegistrationFailed"),
        ("test_refusal_of_dmabuf_alone", "RegistrationFailed"),
        ("test_refusal_of_peer_memory_alone", "RegistrationFailed"),
        ("test_error_without_a_second_route", "ENOMEM"),
        ("test_three_causes", "RegistrationFailed"),
        ("test_causes_in_reverse_order", "RegistrationFailed"),
        ("test_another_operation", "RegistrationFailed"),
        ("test_another_api", "RegistrationFailed"),
        ("test_another_reason", "RegistrationFailed"),
        ("test_one_of_two_devices_has_one_cause", "RegistrationFailed"),
        ("test_cause_without_registration_failed", "Unsupported"),
        ("test_assertion", "AssertionError"),
        ("test_skips_itself", "the case skipped itself"),
        ("test_leaks_after_the_refusal", "teardown: LeakDetected"),
        ("test_tear_down_fails_after_the_refusal", "teardown: RuntimeError"),
        ("test_lacks_no_need_and_is_refused", "RegistrationFailed"),
    ],
)
def test_case_without_the_expected_refusal_fails(child_run: ChildRun, case_name: str, expected_text: str) -> None:
    record = child_run.records[case_name]
    assert (record.verdict, record.is_expected_refusal, record.is_failure) == (Verdict.FAIL, False, True)
    assert expected_text in record.reasons[0].text
    assert child_run.exit_code == 1


def test_case_with_another_unmet_need_does_not_run(child_run: ChildRun) -> None:
    record = child_run.records["test_lacks_another_need_as_well"]
    assert (record.verdict, record.is_expected_refusal, record.evidence) == (Verdict.NOT_RUN, False, {})
    assert len(record.reasons) == 2


def test_refused_cases_are_counted_separately(child_run: ChildRun) -> None:
    assert child_run.records["test_lacks_no_need"].verdict is Verdict.PASS
    # In two more cases, the registration was refused as expected, and then the tear-down failed. They are counted too.
    assert f"{len(REFUSED_CASES) + 2} refused as expected" in child_run.output
    assert "1 not run" in child_run.output


def test_expected_refusals_do_not_fail_a_run(tmp_path: Path, facts: Facts) -> None:
    child_run = run_cases(
        tmp_path, make_soft_roce_facts(facts), CASES, "--profile=lab", "-k", " or ".join(REFUSED_CASES)
    )
    assert {name for name, record in child_run.records.items() if record.is_expected_refusal} >= set(REFUSED_CASES)
    selected_run = run_cases(
        tmp_path, make_soft_roce_facts(facts), CASES, "--profile=lab", "-k", "lease_of_a_cache or manager_of_every_gpu"
    )
    assert selected_run.exit_code == 0, selected_run.output


def test_plan_marks_the_cases_that_will_be_refused(tmp_path: Path, facts: Facts) -> None:
    run_cases(
        tmp_path, make_soft_roce_facts(facts), CASES, "--collect-only", f"--plan={tmp_path}/plan.json", "--profile=lab"
    )
    plan = json.loads((tmp_path / "plan.json").read_text())
    case_by_name = {case["case"].partition("::")[2]: case for case in plan["cases"]}
    assert case_by_name["test_register"]["refused"]
    assert not case_by_name["test_lacks_another_need_as_well"]["refused"]
    assert not case_by_name["test_lacks_no_need"]["refused"]


def test_record_of_a_case_that_ran_is_not_a_refusal() -> None:
    reasons = (CaseReason(text="no", need="verbs.dmabuf_region", foreseen=True),)
    evidence: dict[str, object] = {"refused": []}
    assert make_record(Verdict.NOT_RUN, reasons=reasons, evidence=evidence).is_expected_refusal
    assert not make_record(Verdict.NOT_RUN, reasons=reasons).is_expected_refusal
    assert not make_record(Verdict.FAIL, reasons=reasons, evidence=evidence).is_expected_refusal
    assert not make_record(Verdict.PASS, evidence=evidence).is_expected_refusal


@pytest.mark.parametrize(
    "refusal_toml",
    [
        'need = "a"\ncauses = [{ operation = "ibv_reg_mr", errno = "ENOSUCH" }]',
        'need = "a"\ncauses = [{ operation = "ibv_reg_mr", errno = "ENOTSUP" }]',
        'need = "a"\ncauses = []',
        'need = "a"',
    ],
)
def test_malformed_refusal_of_a_profile_is_refused(tmp_path: Path, refusal_toml: str) -> None:
    (tmp_path / "malformed.toml").write_text(f'schema_version = 1\nabout = ""\n[[refused]]\n{refusal_toml}\n')
    with pytest.raises(UsageError) as error_info:
        load_profile("malformed", folder=tmp_path)
    assert error_info.value.reason is Reason.MALFORMED
