"""Facts about a machine and their JSON form; profiles of machines."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api, ApiError, Reason, UsageError
from gdrkit.host import HostTree
from gdrkit.inventory import Facts, api_query, choose_profile, load_profile, load_profiles, probe
from gdrkit.verbs import NicInfo

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def empty_facts(tmp_path: Path) -> Facts:
    """Return facts about an empty host whose APIs were not queried."""
    return probe(HostTree(tmp_path / "empty"), query_apis=False)


def test_facts_are_read_back_as_the_same_value(facts: Facts, empty_facts: Facts) -> None:
    for original in (facts, empty_facts):
        parsed_facts = Facts.from_json(original.to_json())
        assert parsed_facts == original
        assert parsed_facts.digest == original.digest
    assert facts.digest != empty_facts.digest


def test_facts_cannot_be_changed(empty_facts: Facts) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        empty_facts.machine = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "error_text"),
    [
        ("schema_version", 2, "schema_version"),
        ("gpus", [{"address": "0000:1b:00.0"}], "facts.gpus[0]"),
        ("machine", 5, "facts.machine"),
        ("limits", None, "facts.limits"),
        ("kernel", {"release": None}, "facts.kernel"),
        ("surprise", 1, "surprise"),
    ],
)
def test_error_of_malformed_facts_names_the_field(
    empty_facts: Facts, field: str, value: object, error_text: str
) -> None:
    facts_data = json.loads(empty_facts.to_json())
    facts_data[field] = value
    with pytest.raises(UsageError, match=error_text.replace("[", r"\[").replace("]", r"\]")) as error_info:
        Facts.from_json(json.dumps(facts_data))
    assert error_info.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Facts.from_json(text)


def test_host_without_devices_has_no_failure(empty_facts: Facts) -> None:
    assert (empty_facts.gpus, empty_facts.rdma_devices, empty_facts.nvidia_driver_version) == ((), (), None)
    assert empty_facts.failures == ()
    assert empty_facts.unreadable == ()


def test_truncated_library_is_a_failure_with_advice(tmp_path: Path) -> None:
    for name in ("libibverbs.so.1", "libcuda.so.1"):
        (tmp_path / name).write_bytes(b"\x7fELF\x02\x01\x01" + b"\0" * 30)
    facts = probe(environment={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert facts.cuda is None
    assert facts.verbs is None
    for failure in (facts.cuda_failure, facts.verbs_failure):
        assert failure is not None
        assert failure.reason is Reason.LIBRARY_DAMAGED
        assert failure.what_to_do
    assert [library.path for library in facts.libraries[:1]] == [f"{tmp_path}/libibverbs.so.1"]
    assert facts.libraries[0].error is not None


def test_query_beyond_its_time_limit_is_a_failure(tmp_path: Path) -> None:
    # Python imports this module before it makes the query, so the query is late. A short limit alone would not suffice:
    # on a busy machine, the result may arrive before this process begins to wait for it.
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    facts = probe(environment={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout_s=0.1)
    assert facts.verbs_failure is not None
    assert facts.verbs_failure.reason is Reason.TIMEOUT


def test_profiles_of_the_project_are_valid() -> None:
    names = [profile.name for profile in load_profiles()]
    assert {"any", "bare", "h100-1", "h100-2", "h200-1", "h200-2"} <= set(names)


def test_profiles_of_the_project_have_no_duplicate() -> None:
    """If a profile has an entry twice, a developer could change one entry and forget the other."""
    for profile in load_profiles():
        entries: list[object] = [
            *profile.foreseen,
            *(refusal.need for refusal in profile.refused),
            *((route.device, route.nic, route.way) for route in profile.routes),
            *((expected.case, expected.number) for expected in profile.expected),
        ]
        assert [entry for entry, count in Counter(entries).items() if count > 1] == [], profile.name


def write_profile(folder: Path, name: str, profile_text: str) -> None:
    (folder / f"{name}.toml").write_text(f'schema_version = 1\nabout = "a case"\n{profile_text}')


def test_profile_with_most_conditions_is_chosen(tmp_path: Path, empty_facts: Facts) -> None:
    write_profile(tmp_path, "any", "")
    write_profile(tmp_path, "twins", '[substrate]\ncuda = ["twin"]')
    write_profile(tmp_path, "none", "[match]\ngpu_count = 0\nnic_count = 0")
    write_profile(tmp_path, "large", "[match]\ngpu_count = 8")
    profiles = load_profiles(folder=tmp_path)
    # The profiles are sorted by name: any, large, none, twins.
    assert choose_profile(profiles, empty_facts, {}).name == "none"
    assert choose_profile(profiles[:1] + profiles[3:], empty_facts, {"cuda": "twin"}).name == "twins"
    with pytest.raises(UsageError):
        choose_profile(profiles[1:2], empty_facts, {})


def test_profile_foresees_by_patterns(tmp_path: Path) -> None:
    write_profile(tmp_path, "one", '[[foreseen]]\nneed = "cuda.device(count_min=*)"\nreason = "* needed, 1 found"')
    profile = load_profile("one", folder=tmp_path)
    assert profile.foresees("cuda.device(count_min=2)", "2 CUDA devices needed, 1 found")
    assert not profile.foresees("cuda.device(count_min=2)", "cuda does not answer: timeout")
    assert not profile.foresees("cuda.vmm", "2 CUDA devices needed, 1 found")


@pytest.mark.parametrize(
    "profile_text",
    [
        "[match]\ngpus = 1",
        '[substrate]\ncuda = ["soft"]',
        '[[routes]]\nenough = "some"',
        "cases_min = true",
        "[match",
    ],
)
def test_malformed_profile_is_refused(tmp_path: Path, profile_text: str) -> None:
    write_profile(tmp_path, "bad", profile_text)
    with pytest.raises(UsageError) as error_info:
        load_profile("bad", folder=tmp_path)
    assert error_info.value.reason is Reason.MALFORMED


def test_unknown_profile_error_lists_the_profiles(tmp_path: Path) -> None:
    write_profile(tmp_path, "one", "")
    with pytest.raises(UsageError, match="must be one of one"):
        load_profile("../one", folder=tmp_path)


def test_error_of_a_nic_keeps_no_frames() -> None:
    failure = ApiError(api=Api.VERBS, operation="ibv_open_device", status=13, status_name="EACCES", errno=13)
    nic_info = NicInfo(name="mlx5_0", node_guid="", driver=None, ports=(), error=failure)
    for _ in range(2):
        facts = api_query._collect_nic_facts(nic_info, {})  # noqa: SLF001 - else a NIC that cannot be opened is needed.
        assert facts.failure is not None
        assert facts.failure.errno == 13
    assert failure.__traceback__ is None
