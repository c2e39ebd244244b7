"""Tests of the verdicts of the harness. A child pytest runs the cases in CASES, which pass, fail or break rules."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from qualify.child_pytest import ChildRun, run_cases
from support.json_schema import NEEDS_JSONSCHEMA, find_violations
from support.records import make_facts

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import gaudi as gaudi_needs
from gdrkit.harness.needs import needs, software
from gdrkit.harness.needs import verbs as verbs_needs
from gdrkit.install_paths import install_paths
from gdrkit.inventory import CudaFacts
from gdrkit.inventory.gaudi import GaudiFacts
from gdrkit.registration import FlushOption
from gdrkit.report import Verdict
from gdrkit.serialization import to_json_data

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.needs import Need
    from gdrkit.inventory import Facts

CASES = '''
"""Cases for the harness."""
import errno, os, sys
import pytest
from gdrkit.errors import Api, BrokenResource, Unsupported
from gdrkit.harness.needs import cuda, gaudi, host, needs, verbs

pytestmark = needs(host.memlock(0))
LEAKED_OBJECTS = []

def test_pass(evidence, seed):
    """The first line is the title.

    The rest is not.
    """
    evidence["key"] = {"a": [1, None]}
    evidence["paths"] = [{"python": f"{sys.prefix}/bin/python", "system": "/usr/lib/x"}]
    evidence.number("write_us_p50", 3.5)
    evidence.number("moved_bytes", 7)
    assert 0 <= seed < 2**64

def test_fail(evidence):
    evidence.number("rate_gb_per_s", 400)
    assert {"a": 1} == {"a": 2}

def test_unproven(evidence):
    evidence.unproven("no counter moved")

@needs(verbs.nic())
def test_claims_something_about_hardware(nic, evidence):
    evidence.claim_hardware(Api.VERBS)

@needs(verbs.nic(count_min=99), cuda.device(count_min=99))
def test_all_unmet_needs_are_collected(nics):
    raise AssertionError("must not run")

def test_unsupported_although_all_needs_are_met():
    raise Unsupported(api=Api.VERBS, operation="ibv_reg_dmabuf_mr", status=95, status_name="EOPNOTSUPP", errno=95)

def test_skips_itself():
    pytest.skip("not today")

def test_skips_by_import():
    pytest.importorskip("there_is_no_such_module")

@pytest.mark.skipif(True, reason="never")
def test_skips_by_mark(): ...

@pytest.mark.xfail(reason="known")
def test_is_marked_xfail_and_fails():
    assert False

@pytest.mark.xfail(reason="known")
def test_is_marked_xfail_and_passes(): ...

def test_leaks_a_descriptor():
    LEAKED_OBJECTS.append(os.pipe())

def test_follows_a_leaking_case(): ...

@pytest.fixture(scope="module")
def shared_pipe():
    pipe_ends = os.pipe()
    yield pipe_ends
    for pipe_end in pipe_ends:
        os.close(pipe_end)

def test_uses_a_module_fixture(shared_pipe): ...

@pytest.fixture
def failing_set_up():
    raise RuntimeError("the set-up fails")

def test_set_up_fails(failing_set_up): ...

@pytest.fixture
def failing_tear_down():
    yield
    raise RuntimeError("the tear-down fails")

def test_tear_down_fails(failing_tear_down): ...

def test_uses_a_nic_without_declaring_the_need(nic): ...

def test_records_a_number_without_a_unit(evidence):
    evidence.number("latency", 1)

@needs(verbs.nic())
def test_records_routes(evidence):
    evidence.route(device=0, nic="twin0", method="dmabuf")
    evidence.fell_back("copied through the host", device=0, nic="twin0", method="peer_memory")

@needs(verbs.nic())
def test_leaks_a_nic():
    from gdrkit import verbs
    LEAKED_OBJECTS.append(verbs.Nic.open(next(info.name for info in verbs.list_nics() if info.active)))

@needs(gaudi.device())
def test_uses_a_gaudi():
    from gdrkit import gaudi
    assert gaudi.list_devices()

@needs(verbs.nic())
def test_uses_a_peer(peer, nic):
    peer.queue_pair()
    assert "cuda" not in peer.modules()

@needs(verbs.nic())
def test_kills_its_peer(peer):
    peer.kill()
    with pytest.raises(BrokenResource):
        peer.open_nic()
'''
NEEDS_TWINS = needs(software(Api.VERBS), software(Api.CUDA), verbs_needs.nic())


DEVICE_NEEDS = [
    cuda_needs.device(),
    cuda_needs.dmabuf_export,
    cuda_needs.flush(FlushOption.HOST),
    cuda_needs.ordered_writes,
    gaudi_needs.device(),
    gaudi_needs.mapped_memory,
    gaudi_needs.physical_memory,
]


@pytest.mark.parametrize("need", DEVICE_NEEDS, ids=lambda need: need.name)
def test_need_of_a_device_is_not_met_without_devices(need: Need) -> None:
    cuda_facts = CudaFacts(driver_version="13.0", devices=(), libraries=())
    facts = replace(make_facts(), cuda=cuda_facts, gaudi=GaudiFacts(devices=(), libraries=()))
    assert need.check(facts)


@pytest.fixture(scope="module")
def child_run(tmp_path_factory: pytest.TempPathFactory, facts: Facts) -> ChildRun:
    """Run all cases in CASES once, and return the run."""
    return run_cases(tmp_path_factory.mktemp("harness"), facts, CASES, "--seed=11", "--profile=any")


def get_reason_texts(child_run: ChildRun, case_name: str) -> list[str]:
    """Return the texts of the reasons in the record of a case."""
    return [reason.text for reason in child_run.records[case_name].reasons]


@NEEDS_TWINS
@NEEDS_JSONSCHEMA
def test_case_has_one_record_that_conforms_to_the_schema(child_run: ChildRun) -> None:
    assert len(child_run.records) == CASES.count("\ndef test_")
    for record in child_run.records.values():
        assert find_violations("record-1.json", json.loads(json.dumps(to_json_data(record)))) == []
        assert record.seed == 11
        assert record.profile == "any"
        assert record.facts_digest == child_run.records["test_pass"].facts_digest


@NEEDS_TWINS
def test_record_of_a_passed_case_has_its_evidence(child_run: ChildRun) -> None:
    record = child_run.records["test_pass"]
    assert record.verdict is Verdict.PASS
    assert record.title == "The first line is the title."
    assert record.evidence["key"] == {"a": [1, None]}
    assert record.numbers == {"write_us_p50": 3.5, "moved_bytes": 7.0}


@NEEDS_TWINS
def test_record_of_a_failed_case_has_the_reason_and_no_numbers(child_run: ChildRun) -> None:
    record = child_run.records["test_fail"]
    assert record.verdict is Verdict.FAIL
    assert "assert" in get_reason_texts(child_run, "test_fail")[0]
    assert "test_cases.py" in str(record.evidence["traceback"])
    assert record.numbers == {}
    assert child_run.exit_code == 1


@NEEDS_TWINS
def test_case_that_declares_itself_unproven_is_unproven(child_run: ChildRun) -> None:
    assert child_run.records["test_unproven"].verdict is Verdict.UNPROVEN
    assert get_reason_texts(child_run, "test_unproven") == ["no counter moved"]
    assert "2 unproven" in child_run.output


@NEEDS_TWINS
def test_claim_about_hardware_is_unproven_on_twins(child_run: ChildRun) -> None:
    assert child_run.records["test_claims_something_about_hardware"].verdict is Verdict.UNPROVEN
    assert get_reason_texts(child_run, "test_claims_something_about_hardware") == ["ran on software twins"]


@NEEDS_TWINS
def test_record_names_the_apis_that_its_case_needs(child_run: ChildRun) -> None:
    assert child_run.records["test_records_routes"].uses == ("verbs",)
    assert child_run.records["test_uses_a_gaudi"].uses == ("hlthunk",)


@NEEDS_TWINS
def test_record_has_all_unmet_needs_of_its_case(child_run: ChildRun) -> None:
    record = child_run.records["test_all_unmet_needs_are_collected"]
    assert record.verdict is Verdict.NOT_RUN
    assert [reason.need for reason in record.reasons] == ["verbs.nic(count_min=99)", "cuda.device(count_min=99)"]
    assert all(reason.foreseen for reason in record.reasons)
    assert record.substrate == {}
    assert "99 CUDA devices needed, 2 found" in child_run.output


@NEEDS_TWINS
@pytest.mark.parametrize(
    ("case_name", "expected_text"),
    [
        (
            "test_unsupported_although_all_needs_are_met",
            "Unsupported: verbs: ibv_reg_dmabuf_mr() failed: Operation not supported (EOPNOTSUPP)",
        ),
        ("test_skips_itself", "the case skipped itself"),
        ("test_skips_by_import", "the case skipped itself"),
        ("test_skips_by_mark", "the case skipped itself"),
        ("test_is_marked_xfail_and_fails", "the case is marked as an expected failure"),
        ("test_is_marked_xfail_and_passes", "the case is marked as an expected failure"),
        ("test_leaks_a_descriptor", "teardown: LeakDetected: still open: 2 descriptor of pipe"),
        ("test_set_up_fails", "setup: RuntimeError: the set-up fails"),
        ("test_tear_down_fails", "teardown: RuntimeError: the tear-down fails"),
        ("test_uses_a_nic_without_declaring_the_need", "declares no need of verbs"),
        ("test_records_a_number_without_a_unit", "has no unit"),
        ("test_leaks_a_nic", "verbs.nic"),
    ],
)
def test_case_that_breaks_a_rule_fails(child_run: ChildRun, case_name: str, expected_text: str) -> None:
    assert child_run.records[case_name].verdict is Verdict.FAIL
    assert expected_text in get_reason_texts(child_run, case_name)[0]


@NEEDS_TWINS
@pytest.mark.parametrize("case_name", ["test_follows_a_leaking_case", "test_uses_a_module_fixture"])
def test_leak_fails_only_the_case_that_leaked(child_run: ChildRun, case_name: str) -> None:
    assert child_run.records[case_name].verdict is Verdict.PASS


@NEEDS_TWINS
def test_leak_is_also_detected_by_the_ledger_of_the_twin(child_run: ChildRun) -> None:
    assert "verbs twin: ibv_context" in get_reason_texts(child_run, "test_leaks_a_nic")[0]


@NEEDS_TWINS
def test_record_has_the_routes_of_its_case(child_run: ChildRun) -> None:
    direct_route, fallback_route = child_run.records["test_records_routes"].routes
    assert (direct_route.device_index, direct_route.nic, direct_route.way, direct_route.fell_back) == (
        0,
        "twin0",
        "dmabuf",
        None,
    )
    assert fallback_route.fell_back == "copied through the host"


@NEEDS_TWINS
def test_record_has_the_libraries_of_all_its_processes(child_run: ChildRun) -> None:
    record = child_run.records["test_uses_a_peer"]
    verbs_twins = [library for library in record.libraries if library.soname == "libibverbs.so.1"]
    assert [library.process for library in verbs_twins] == ["case", "peer0"]
    assert all(library.build_id and [note.owner for note in library.notes] == ["GDRKIT"] for library in verbs_twins)
    assert record.substrate["verbs"] == "twin"
    # Records of several machines are compared, so a record must not contain paths that only one machine has.
    assert not any(library.path.startswith((sys.prefix, str(install_paths().root))) for library in record.libraries)
    recorded_paths = str(child_run.records["test_pass"].evidence["paths"])
    assert "/bin/python" in recorded_paths
    assert sys.prefix not in recorded_paths
    assert "'/usr/lib/x'" in recorded_paths


def test_machine_specific_path_gets_a_portable_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system_folder = "/usr/lib/x86_64-linux-gnu"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}/lib/:{system_folder}:")
    monkeypatch.setenv("HOME", f"{tmp_path}/me")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    portable_name_by_path = {
        f"{tmp_path}/packages/a/b.so": "{site}/a/b.so",
        f"{tmp_path}/lib/libcuda.so.1": "{library_path}/libcuda.so.1",
        f"{tmp_path}/me/libcuda.so.1": "{home}/libcuda.so.1",
        f"{system_folder}/libcuda.so.1": f"{system_folder}/libcuda.so.1",
        f"{install_paths().root}/gdrkit/_a.so": "gdrkit/_a.so"
        if install_paths().is_checkout
        else f"{install_paths().root}/gdrkit/_a.so",
    }
    assert {path: install_paths().portable(path) for path in portable_name_by_path} == portable_name_by_path


@NEEDS_TWINS
def test_killed_peer_does_not_fail_its_case(child_run: ChildRun) -> None:
    assert child_run.records["test_kills_its_peer"].verdict is Verdict.PASS


@NEEDS_TWINS
def test_unmet_need_that_is_not_foreseen_fails_the_run(tmp_path: Path, facts: Facts) -> None:
    case_source = """
    from gdrkit.harness.needs import needs, verbs
    def test_pass(): ...
    @needs(verbs.nic(count_min=99))
    def test_many(): ...
    """
    child_run = run_cases(tmp_path, facts, case_source, "--profile=bare")
    assert child_run.exit_code == 1
    assert child_run.records["test_many"].verdict is Verdict.NOT_RUN
    assert child_run.records["test_many"].is_failure
    assert "NOT FORESEEN by profile bare" in child_run.output


@NEEDS_TWINS
def test_run_on_another_substrate_than_required_is_refused(tmp_path: Path, facts: Facts) -> None:
    child_run = run_cases(tmp_path, facts, "def test_pass(): ...", "--substrate=verbs=hardware,cuda=twin")
    assert child_run.exit_code == 4
    assert "verbs must run on hardware, but runs on twin" in child_run.output
    assert child_run.records == {}


@pytest.mark.parametrize(
    ("option", "expected_text"),
    [
        ("--substrate=soft", "is not a substrate"),
        ("--profile=never", "not 'never'"),
        ("--seed=many", "invalid"),
    ],
)
def test_invalid_option_is_an_error_and_runs_no_case(
    tmp_path: Path, facts: Facts, option: str, expected_text: str
) -> None:
    child_run = run_cases(tmp_path, facts, "def test_pass(): ...", option)
    assert child_run.exit_code == 4
    assert expected_text in child_run.output
    assert child_run.records == {}


def test_module_that_skips_itself_fails_the_run(tmp_path: Path, facts: Facts) -> None:
    child_run = run_cases(tmp_path, facts, "import pytest\npytest.skip('no', allow_module_level=True)", "--profile=any")
    assert child_run.exit_code != 0
    assert "skips itself at its import" in child_run.output


def test_plan_is_written_without_running_cases(tmp_path: Path, facts: Facts) -> None:
    case_source = """
    from gdrkit.harness.needs import needs, verbs
    @needs(verbs.nic(count_min=99))
    def test_many():
        "Title."
    def test_one(): ...
    """
    child_run = run_cases(
        tmp_path, facts, case_source, "--collect-only", f"--plan={tmp_path}/plan.json", "--profile=any"
    )
    assert child_run.records == {}
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [case["case"] for case in plan["cases"]] == ["test_cases.py::test_many", "test_cases.py::test_one"]
    assert plan["cases"][0]["title"] == "Title."
    assert plan["cases"][0]["unmet"][0]["need"] == "verbs.nic(count_min=99)"
    (tmp_path / "selected").write_text("test_cases.py::test_one\n")
    selected_run = run_cases(tmp_path, facts, case_source, f"--cases={tmp_path}/selected", "--profile=any")
    assert list(selected_run.records) == ["test_one"]
