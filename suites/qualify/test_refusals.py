"""A refusal that a profile states is shown or the case fails: a pytest of its own, on cases that the twin refuses.

The child is told facts of a machine whose kernel has Soft-RoCE, so that the profile `lab` fits; a fault plan has the
twin answer what such a kernel answers, or something else.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from qualify.child_pytest import ChildRun, run_cases
from support.json_schema import problems
from support.records import record_of

from gdrkit.errors import Api, Reason, UsageError
from gdrkit.evidence import KernelEvidence, RdmaEvidence
from gdrkit.harness.needs import cuda, needs, software, verbs
from gdrkit.host import RdmaDevice
from gdrkit.install_paths import install_paths
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

WAY = needs(verbs.nic(), verbs.dmabuf_region, cuda.device())
KEPT = []

@contextlib.contextmanager
def answers(dmabuf="EOPNOTSUPP", address="EFAULT"):
    rules = ["gdrkit-faults 1"]
    for name, number in (("ibv_reg_dmabuf_mr", dmabuf), ("ibv_reg_mr", address)):
        rules += [f"{name} call=* errno={number}"] if number else []
    launch.twin_control().set_faults("verbs", "\\n".join([*rules, ""]))
    try:
        yield
    finally:
        launch.twin_control().set_faults("verbs", "gdrkit-faults 1\\n")

def cause(operation, number, api=Api.VERBS):
    return Unsupported(api=api, operation=operation, status=number, status_name=errno.errorcode[number], errno=number)

def refused(*causes, reason=Reason.NO_ROUTE):
    raise RegistrationFailed("no", causes=causes, reason=reason)

DMABUF = cause("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP)
ADDRESS = cause("ibv_reg_mr", errno.EFAULT)

@WAY
def test_refused(device, nic, evidence):
    evidence["seen"] = 1
    evidence.number("write_us", 1)
    evidence.route(device=device, nic=nic, way="dmabuf")
    with answers(), device.allocate(4096) as memory:
        register(memory, [nic])

@needs(verbs.nic(), verbs.peer_memory, cuda.device())
def test_refused_by_a_cache(device, nic):
    with answers(), device.allocate(4096) as memory, RegionCache([nic]) as cache:
        cache.lease(memory)

@WAY
def test_refused_for_every_gpu():
    with answers(), GdrManager() as manager:
        manager.device(0)

@pytest.fixture
def registration(device, nic):
    with answers(), device.allocate(4096) as memory, register(memory, [nic]) as made:
        yield made

@WAY
def test_refused_in_its_set_up(registration):
    raise AssertionError("must not run")

@WAY
def test_passes(device, nic):
    with device.allocate(4096) as memory:
        register(memory, [nic]).close()

@WAY
def test_does_nothing(): ...

@WAY
def test_another_errno_of_the_dmabuf(device, nic):
    with answers(dmabuf="EPROTONOSUPPORT"), device.allocate(4096) as memory:
        register(memory, [nic])

@WAY
def test_another_errno_of_the_address(device, nic):
    with answers(address="EOPNOTSUPP"), device.allocate(4096) as memory:
        register(memory, [nic])

@WAY
def test_one_cause_by_dmabuf(device, nic):
    with answers(), device.allocate(4096) as memory:
        register(memory, [nic], route=RegistrationRoute.DMABUF)

@WAY
def test_one_cause_by_address(device, nic):
    with answers(), device.allocate(4096) as memory:
        register(memory, [nic], route=RegistrationRoute.PEER_MEMORY)

@WAY
def test_an_error_that_no_other_way_follows(device, nic):
    with answers(dmabuf="ENOMEM"), device.allocate(4096) as memory:
        register(memory, [nic])

@WAY
def test_three_causes():
    refused(DMABUF, ADDRESS, ADDRESS)

@WAY
def test_the_other_order():
    refused(ADDRESS, DMABUF)

@WAY
def test_another_operation():
    refused(DMABUF, cause("ibv_open_device", errno.EFAULT))

@WAY
def test_another_api():
    refused(DMABUF, cause("ibv_reg_mr", errno.EFAULT, api=Api.CUDA))

@WAY
def test_another_reason():
    refused(DMABUF, ADDRESS, reason=Reason.OTHER)

@WAY
def test_one_of_two_devices_has_one_cause():
    whole = RegistrationFailed("no", causes=(DMABUF, ADDRESS), reason=Reason.NO_ROUTE)
    half = RegistrationFailed("no", causes=(DMABUF,), reason=Reason.NO_ROUTE)
    refused(whole, half)

@WAY
def test_a_bare_cause():
    raise DMABUF

@WAY
def test_an_assertion():
    assert False, "ibv_reg_dmabuf_mr EOPNOTSUPP ibv_reg_mr EFAULT"

@WAY
def test_skips_itself():
    pytest.skip("ibv_reg_dmabuf_mr EOPNOTSUPP ibv_reg_mr EFAULT")

@WAY
def test_leaks_after_it_was_refused(device, nic):
    KEPT.append(os.pipe())
    with answers(), device.allocate(4096) as memory:
        register(memory, [nic])

@pytest.fixture
def untidy():
    yield
    raise RuntimeError("no tear-down today")

@WAY
def test_tear_down_fails_after_it_was_refused(untidy):
    refused(DMABUF, ADDRESS)

@WAY
@needs(host.module("there_is_no_such_module"))
def test_lacks_more():
    raise AssertionError("must not run")

@needs(verbs.nic())
def test_lacks_nothing_and_is_refused():
    refused(DMABUF, ADDRESS)

@needs(verbs.nic())
def test_lacks_nothing(): ...
'''
REFUSED = ("test_refused", "test_refused_by_a_cache", "test_refused_for_every_gpu", "test_refused_in_its_set_up")
CAUSES = [
    {"api": "verbs", "operation": "ibv_reg_dmabuf_mr", "status": 95, "status_name": "EOPNOTSUPP", "errno": 95},
    {"api": "verbs", "operation": "ibv_reg_mr", "status": 14, "status_name": "EFAULT", "errno": 14},
]


def soft_roce(facts: Facts) -> Facts:
    """These facts as a kernel with Soft-RoCE devices would have them."""
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
def run(tmp_path_factory: pytest.TempPathFactory, facts: Facts) -> ChildRun:
    return run_cases(tmp_path_factory.mktemp("refusals"), soft_roce(facts), CASES, "--seed=11", "--profile=lab")


@pytest.mark.parametrize("name", REFUSED)
def test_the_stated_refusal_is_not_run_with_its_evidence(run: ChildRun, name: str) -> None:
    record = run.records[name]
    assert (record.verdict, record.refused, record.is_failure) == (Verdict.NOT_RUN, True, False)
    seen = record.evidence["refused"]
    assert isinstance(seen, list)
    assert seen == [{"reason": "no_route", "causes": CAUSES}] * len(seen)
    assert len(seen) == (2 if name == "test_refused_for_every_gpu" else 1)
    # The need that is not met, and what was seen of it.
    assert record.reasons[0].need in {"verbs.dmabuf_region", "verbs.peer_memory"}
    assert "failed: EOPNOTSUPP (95), ibv_reg_mr failed: EFAULT (14)" in record.reasons[1].text
    assert all(reason.foreseen for reason in record.reasons)
    # It ran, so what it ran on is known; and it shows no route and no number.
    assert record.libraries
    assert (record.routes, record.numbers) == ((), {})
    schema = json.loads((install_paths().schemas / "record-1.json").read_text())
    assert list(problems(schema, json.loads(json.dumps(to_json_data(record))))) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_passes", "nothing was refused"),
        ("test_does_nothing", "nothing was refused"),
        ("test_another_errno_of_the_dmabuf", "EPROTONOSUPPORT"),
        ("test_another_errno_of_the_address", "RegistrationFailed"),
        ("test_one_cause_by_dmabuf", "RegistrationFailed"),
        ("test_one_cause_by_address", "RegistrationFailed"),
        ("test_an_error_that_no_other_way_follows", "ENOMEM"),
        ("test_three_causes", "RegistrationFailed"),
        ("test_the_other_order", "RegistrationFailed"),
        ("test_another_operation", "RegistrationFailed"),
        ("test_another_api", "RegistrationFailed"),
        ("test_another_reason", "RegistrationFailed"),
        ("test_one_of_two_devices_has_one_cause", "RegistrationFailed"),
        ("test_a_bare_cause", "Unsupported"),
        ("test_an_assertion", "AssertionError"),
        ("test_skips_itself", "the case skipped itself"),
        ("test_leaks_after_it_was_refused", "teardown: LeakDetected"),
        ("test_tear_down_fails_after_it_was_refused", "teardown: RuntimeError"),
        ("test_lacks_nothing_and_is_refused", "RegistrationFailed"),
    ],
)
def test_anything_else_is_a_failure(run: ChildRun, name: str, words: str) -> None:
    record = run.records[name]
    assert (record.verdict, record.refused, record.is_failure) == (Verdict.FAIL, False, True)
    assert words in record.reasons[0].text
    assert run.code == 1


def test_what_lacks_more_does_not_run(run: ChildRun) -> None:
    record = run.records["test_lacks_more"]
    assert (record.verdict, record.refused, record.evidence) == (Verdict.NOT_RUN, False, {})
    assert len(record.reasons) == 2


def test_refused_cases_are_counted_apart(run: ChildRun) -> None:
    assert run.records["test_lacks_nothing"].verdict is Verdict.PASS
    # Two more were refused, and fail in their tear-down.
    assert f"{len(REFUSED) + 2} refused as expected" in run.printed
    assert "1 not run" in run.printed


def test_refusals_alone_do_not_fail_a_run(tmp_path: Path, facts: Facts) -> None:
    run = run_cases(tmp_path, soft_roce(facts), CASES, "--profile=lab", "-k", " or ".join(REFUSED))
    assert {name for name, record in run.records.items() if record.refused} >= set(REFUSED)
    only = run_cases(tmp_path, soft_roce(facts), CASES, "--profile=lab", "-k", "refused_by_a_cache or for_every_gpu")
    assert only.code == 0


def test_the_plan_says_what_will_be_refused(tmp_path: Path, facts: Facts) -> None:
    run_cases(tmp_path, soft_roce(facts), CASES, "--collect-only", f"--plan={tmp_path}/plan.json", "--profile=lab")
    plan = json.loads((tmp_path / "plan.json").read_text())
    planned = {case["case"].partition("::")[2]: case for case in plan["cases"]}
    assert planned["test_refused"]["refused"]
    assert not planned["test_lacks_more"]["refused"]
    assert not planned["test_lacks_nothing"]["refused"]


def test_only_a_record_that_did_not_run_is_a_refusal() -> None:
    reasons = (CaseReason(text="no", need="verbs.dmabuf_region", foreseen=True),)
    evidence: dict[str, object] = {"refused": []}
    assert record_of(Verdict.NOT_RUN, reasons=reasons, evidence=evidence).refused
    assert not record_of(Verdict.NOT_RUN, reasons=reasons).refused
    assert not record_of(Verdict.FAIL, reasons=reasons, evidence=evidence).refused
    assert not record_of(Verdict.PASS, evidence=evidence).refused


@pytest.mark.parametrize(
    "refused",
    [
        'need = "a"\ncauses = [{ operation = "ibv_reg_mr", errno = "ENOSUCH" }]',
        'need = "a"\ncauses = [{ operation = "ibv_reg_mr", errno = "ENOTSUP" }]',
        'need = "a"\ncauses = []',
        'need = "a"',
    ],
)
def test_a_refusal_that_could_never_be_met_is_malformed(tmp_path: Path, refused: str) -> None:
    (tmp_path / "odd.toml").write_text(f'schema_version = 1\nabout = ""\n[[refused]]\n{refused}\n')
    with pytest.raises(UsageError) as raised:
        load_profile("odd", folder=tmp_path)
    assert raised.value.reason is Reason.MALFORMED
