"""What a profile expects of measured numbers: within its tolerance, from its source, and of hardware alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from support.rates import judge_numbers

from gdrkit.errors import Reason, UsageError
from gdrkit.harness.case import CASE
from gdrkit.harness.evidence import Evidence
from gdrkit.harness.session import SESSION
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
from gdrkit.qualify.throughput import judge
from gdrkit.report.substrate import Substrate
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

COPY = "throughput/test_copies.py::test_pinned_copy[host_to_device-256MiB]"
RATE = "rate_gb_per_s_median"
FIRST = "schema_version = 1\nabout = 'a machine'\n[[expected]]\ncase = '*'\nnumber = 'a_us'\n"


@pytest.mark.parametrize(("found", "verdict"), [(49.8, Verdict.PASS), (49.7, Verdict.FAIL), (80.0, Verdict.PASS)])
def test_a_pinned_copy_on_an_h200_may_be_a_tenth_slower(found: float, verdict: Verdict) -> None:
    (judged,) = judge(COPY, {RATE: found, "rounds_count": 15}, profile=load_profile("h200-1"), limits={})
    assert judged.verdict is verdict
    assert "expected 55.3, tolerance 10 % (measured on one H200" in judged.text


def test_a_time_may_not_be_longer() -> None:
    short = ExpectedNumber(case="*", number="latency_us_p50", source="a paper", value=2.0, better="less")
    profile = Profile(schema_version=1, name="a", about="", expected=(short,))
    found = [judge("x", {"latency_us_p50": us}, profile=profile, limits={})[0].verdict for us in (1.0, 2.2, 2.3)]
    assert found == [Verdict.PASS, Verdict.PASS, Verdict.FAIL]


def machine(*, virtual_machine: str | None = None) -> tuple[Topology, Facts]:
    gpu = TopologyDevice("GPU0", "gpu", "0000:41:00.0", 0, ("0000:40",), "32.0 GT/s PCIe x16")
    nic = TopologyDevice("mlx5_0", "nic", "0000:42:00.0", 0, ("0000:40",), "8.0 GT/s PCIe x8")
    found = Topology(1, (gpu, nic), {}, {}, virtual_machine)
    return found, replace(probe(query_apis=False), rdma_devices=())


def test_a_way_is_as_fast_as_its_slowest_link() -> None:
    tree, facts = machine()
    alone, both = path_limit(tree, facts, ["GPU0"]), path_limit(tree, facts, ["GPU0", "mlx5_0"])
    assert alone is not None
    assert both is not None
    assert (round(alone.gb_per_s, 2), round(both.gb_per_s, 2)) == (63.02, 7.88)
    assert "mlx5_0" in both.why
    assert path_limit(tree, facts, ["GPU7"]) is None
    tree, facts = machine(virtual_machine="kvm")
    assert path_limit(tree, facts, ["GPU0"]) is None


@pytest.mark.parametrize(
    ("found", "verdicts"),
    [
        (56.0, [Verdict.PASS, Verdict.PASS]),
        (40.0, [Verdict.PASS, Verdict.FAIL]),
        # No link carries that: the bytes came from somewhere else.
        (70.0, [Verdict.FAIL, Verdict.PASS]),
    ],
)
def test_a_rate_is_judged_by_the_links_where_nobody_measured_the_machine(found: float, verdicts: list[Verdict]) -> None:
    tree, facts = machine()
    limit = path_limit(tree, facts, ["GPU0"])
    assert limit is not None
    judged = judge(COPY, {RATE: found}, profile=load_profile("any"), limits={"rate": limit})
    assert [each.verdict for each in judged] == verdicts


@pytest.mark.parametrize("on", [Substrate.TWIN, Substrate.HARDWARE])
def test_only_a_slow_number_of_hardware_ends_a_case(on: Substrate) -> None:
    evidence, session = Evidence(), SimpleNamespace(substrate={"cuda": on}, profile=load_profile("h200-1"))
    session.facts = probe(query_apis=False)
    item = SimpleNamespace(nodeid=COPY, stash={CASE: SimpleNamespace(evidence=evidence)})
    item.config = SimpleNamespace(stash={SESSION: session})
    evidence["measured_apis"] = ["cuda"]
    evidence.number(RATE, 20.0)
    if on is Substrate.TWIN:
        judge_numbers(cast("Any", item))
        assert "judged" not in evidence.kept
    else:
        with pytest.raises(AssertionError, match=r"is 20; expected 55\.3"):
            judge_numbers(cast("Any", item))
        assert [each["verdict"] for each in cast("Any", evidence["judged"])] == ["fail"]


def test_every_expectation_of_a_profile_has_its_source() -> None:
    expected = [each for profile in load_profiles() for each in profile.expected]
    assert len(expected) >= 5
    assert all(each.source for each in expected)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("source = 'x'", "needs either value or limit_percent"),
        ("source = 'x'\nvalue = 1\nlimit_percent = 5", "needs either value or limit_percent"),
        ("source = 'x'\nvalue = 1\ntolerance_percent = 100", "out of range"),
        ("source = 'x'\nvalue = 1\nbetter = 'most'", "better must be 'more' or 'less'"),
        ("source = ''\nvalue = 1", "no source"),
    ],
)
def test_a_malformed_expectation_is_one_clear_error(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.toml").write_text(FIRST + line)
    with pytest.raises(UsageError, match=said) as caught:
        load_profile("a", folder=tmp_path)
    assert caught.value.reason is Reason.MALFORMED
