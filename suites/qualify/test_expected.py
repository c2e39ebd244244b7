"""Checks of measured numbers against the expectations of a profile and the limits of the links.

A profile is a file about one kind of machine.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from support.rates import check_expected_numbers

from gdrkit import serialization
from gdrkit.errors import Reason, UsageError
from gdrkit.harness.case import CASE_KEY
from gdrkit.harness.evidence import Evidence
from gdrkit.harness.session import SESSION_KEY
from gdrkit.inventory import (
    ExpectedNumber,
    Facts,
    Profile,
    Topology,
    TopologyDevice,
    load_profile,
    load_profiles,
    path_limit,
    probe,
)
from gdrkit.qualify.throughput import check_numbers
from gdrkit.report.substrate import Substrate
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

COPY_CASE = "throughput/test_copies.py::test_pinned_copy[host_to_device-256MiB]"
RATE_NAME = "rate_gb_per_s_median"
# The beginning of a profile, up to the first keys of an expectation.
PROFILE_BEGINNING = "schema_version = 1\nabout = 'a machine'\n[[expected]]\ncase = '*'\nnumber = 'a_us'\n"


@pytest.mark.parametrize(
    ("rate_gb_per_s", "verdict"), [(49.8, Verdict.PASS), (49.7, Verdict.FAIL), (80.0, Verdict.PASS)]
)
def test_copy_rate_may_be_below_its_expectation_by_10_percent(rate_gb_per_s: float, verdict: Verdict) -> None:
    (check,) = check_numbers(
        COPY_CASE, {RATE_NAME: rate_gb_per_s, "rounds_count": 15}, profile=load_profile("h200-1"), limits={}
    )
    assert check.verdict is verdict
    assert "expected 55.3, tolerance 10 % (measured on one H200" in check.text
    # The report reads these keys from the evidence of a record.
    assert serialization.to_json_data(check) == {
        "number": RATE_NAME,
        "found": rate_gb_per_s,
        "bound": pytest.approx(0.9 * 55.3),
        "verdict": verdict.value,
        "text": check.text,
    }


def test_latency_above_its_tolerance_fails() -> None:
    expected_number = ExpectedNumber(case="*", number="latency_us_p50", source="a paper", value=2.0, better="less")
    profile = Profile(schema_version=1, name="a", about="", expected=(expected_number,))
    verdicts = [
        check_numbers("x", {"latency_us_p50": latency_us}, profile=profile, limits={})[0].verdict
        for latency_us in (1.0, 2.2, 2.3)
    ]
    assert verdicts == [Verdict.PASS, Verdict.PASS, Verdict.FAIL]


def make_topology_and_facts(*, virtual_machine: str | None = None) -> tuple[Topology, Facts]:
    """Return the topology and facts of a machine. Its GPU has 16 PCIe lanes, and its NIC has 8 slower lanes.

    The facts contain no RDMA ports, so only the PCIe links limit the paths.
    """
    gpu = TopologyDevice("GPU0", "gpu", "0000:41:00.0", 0, ("0000:40",), "32.0 GT/s PCIe x16")
    nic = TopologyDevice("mlx5_0", "nic", "0000:42:00.0", 0, ("0000:40",), "8.0 GT/s PCIe x8")
    topology = Topology(1, (gpu, nic), {}, {}, virtual_machine)
    return topology, replace(probe(query_apis=False), rdma_devices=())


def test_path_limit_is_the_limit_of_its_slowest_link() -> None:
    topology, facts = make_topology_and_facts()
    gpu_limit, gpu_and_nic_limit = (
        path_limit(topology, facts, ["GPU0"]),
        path_limit(topology, facts, ["GPU0", "mlx5_0"]),
    )
    assert gpu_limit is not None
    assert gpu_and_nic_limit is not None
    assert (round(gpu_limit.gb_per_s, 2), round(gpu_and_nic_limit.gb_per_s, 2)) == (63.02, 7.88)
    assert "mlx5_0" in gpu_and_nic_limit.source


def test_path_limit_is_unknown_for_an_unknown_device() -> None:
    topology, facts = make_topology_and_facts()
    assert path_limit(topology, facts, ["GPU7"]) is None


def test_path_limit_is_unknown_in_a_virtual_machine() -> None:
    topology, facts = make_topology_and_facts(virtual_machine="kvm")
    assert path_limit(topology, facts, ["GPU0"]) is None


@pytest.mark.parametrize(
    # The first check fails if the rate is above the limit of the link. The second check fails if the rate is below the
    # percentage of the limit that the profile "any" requires.
    ("rate_gb_per_s", "expected_verdicts"),
    [
        (56.0, [Verdict.PASS, Verdict.PASS]),
        (40.0, [Verdict.PASS, Verdict.FAIL]),
        # This rate is higher than the rate of the link, so the data did not take this path.
        (70.0, [Verdict.FAIL, Verdict.PASS]),
    ],
)
def test_rate_without_an_expectation_is_checked_by_link_limits(
    rate_gb_per_s: float, expected_verdicts: list[Verdict]
) -> None:
    topology, facts = make_topology_and_facts()
    limit = path_limit(topology, facts, ["GPU0"])
    assert limit is not None
    checks = check_numbers(COPY_CASE, {RATE_NAME: rate_gb_per_s}, profile=load_profile("any"), limits={"rate": limit})
    assert [check.verdict for check in checks] == expected_verdicts


@pytest.mark.parametrize("substrate", [Substrate.TWIN, Substrate.HARDWARE])
def test_rate_below_its_expectation_fails_only_on_hardware(substrate: Substrate) -> None:
    # The namespaces replace the session of the harness and the item of pytest.
    evidence, session = Evidence(), SimpleNamespace(substrates={"cuda": substrate}, profile=load_profile("h200-1"))
    session.facts = probe(query_apis=False)
    item = SimpleNamespace(nodeid=COPY_CASE, stash={CASE_KEY: SimpleNamespace(evidence=evidence)})
    item.config = SimpleNamespace(stash={SESSION_KEY: session})
    evidence["measured_apis"] = ["cuda"]
    evidence.number(RATE_NAME, 20.0)
    if substrate is Substrate.TWIN:
        check_expected_numbers(cast("Any", item))
        assert "judged" not in evidence.values
    else:
        with pytest.raises(AssertionError, match=r"is 20; expected 55\.3"):
            check_expected_numbers(cast("Any", item))
        assert [check["verdict"] for check in cast("Any", evidence["judged"])] == ["fail"]


def test_expectations_of_all_profiles_have_a_source() -> None:
    expected_numbers = [expected_number for profile in load_profiles() for expected_number in profile.expected]
    assert len(expected_numbers) >= 5
    assert all(expected_number.source for expected_number in expected_numbers)


@pytest.mark.parametrize(
    ("expectation_toml", "error_pattern"),
    [
        ("source = 'x'", "needs either value or limit_percent"),
        ("source = 'x'\nvalue = 1\nlimit_percent = 5", "needs either value or limit_percent"),
        ("source = 'x'\nvalue = 1\ntolerance_percent = 100", "out of range"),
        ("source = 'x'\nvalue = 1\nbetter = 'most'", "better must be 'more' or 'less'"),
        ("source = ''\nvalue = 1", "no source"),
    ],
)
def test_malformed_expectation_is_refused(tmp_path: Path, expectation_toml: str, error_pattern: str) -> None:
    (tmp_path / "a.toml").write_text(PROFILE_BEGINNING + expectation_toml)
    with pytest.raises(UsageError, match=error_pattern) as error_info:
        load_profile("a", folder=tmp_path)
    assert error_info.value.reason is Reason.MALFORMED
