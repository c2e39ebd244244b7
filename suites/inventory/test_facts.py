"""Facts: found, frozen, written, read back; and profiles, which judge them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api, ApiError, Reason, UsageError
from gdrkit.host import HostTree
from gdrkit.inventory import Facts, ask, choose_profile, load_profile, load_profiles, probe
from gdrkit.verbs import NicInfo

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def unasked(tmp_path: Path) -> Facts:
    """Of an empty host whose APIs nobody asked."""
    return probe(HostTree(tmp_path / "empty"), ask_apis=False)


def test_facts_are_read_back_as_the_same_value(facts: Facts, unasked: Facts) -> None:
    for found in (facts, unasked):
        again = Facts.from_json(found.to_json())
        assert again == found
        assert again.digest == found.digest
    assert facts.digest != unasked.digest


def test_facts_cannot_be_changed(unasked: Facts) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        unasked.machine = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("schema_version", 2, "schema_version"),
        ("gpus", [{"address": "0000:1b:00.0"}], "facts.gpus[0]"),
        ("machine", 5, "facts.machine"),
        ("limits", None, "facts.limits"),
        ("kernel", {"release": None}, "facts.kernel"),
        ("surprise", 1, "surprise"),
    ],
)
def test_malformed_facts_are_refused_by_the_name_of_the_field(
    unasked: Facts, field: str, value: object, named: str
) -> None:
    data = json.loads(unasked.to_json())
    data[field] = value
    with pytest.raises(UsageError, match=named.replace("[", r"\[").replace("]", r"\]")) as caught:
        Facts.from_json(json.dumps(data))
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_what_is_no_facts_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Facts.from_json(text)


def test_a_bare_host_says_none_and_not_an_error(unasked: Facts) -> None:
    assert (unasked.gpus, unasked.rdma_devices, unasked.nvidia_driver_version) == ((), (), None)
    assert unasked.failures == ()
    assert unasked.unreadable == ()


def test_an_api_whose_library_is_cut_off_is_a_failure_with_something_to_do(tmp_path: Path) -> None:
    for name in ("libibverbs.so.1", "libcuda.so.1"):
        (tmp_path / name).write_bytes(b"\x7fELF\x02\x01\x01" + b"\0" * 30)
    found = probe(environment={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert found.cuda is None
    assert found.verbs is None
    for failure in (found.cuda_failure, found.verbs_failure):
        assert failure is not None
        assert failure.reason is Reason.LIBRARY_DAMAGED
        assert failure.what_to_do
    assert [library.path for library in found.libraries[:1]] == [f"{tmp_path}/libibverbs.so.1"]
    assert found.libraries[0].error is not None


def test_an_api_that_does_not_answer_in_time_is_a_failure() -> None:
    found = probe(timeout_s=0.001)
    assert found.verbs_failure is not None
    assert found.verbs_failure.reason is Reason.TIMEOUT


def test_the_profiles_of_the_house_can_be_read() -> None:
    names = [profile.name for profile in load_profiles()]
    assert {"any", "bare", "h200-1", "h200-2"} <= set(names)


def test_no_profile_of_the_house_says_anything_twice() -> None:
    """What is there twice is changed in one place, and stays as it was in the other."""
    for profile in load_profiles():
        said: list[object] = [
            *profile.foreseen,
            *(each.need for each in profile.refused),
            *((each.device, each.nic, each.way) for each in profile.routes),
            *((each.case, each.number) for each in profile.expected),
        ]
        assert [each for each, count in Counter(said).items() if count > 1] == [], profile.name


def profile_file(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.toml").write_text(f'schema_version = 1\nabout = "a case"\n{text}')


def test_of_the_profiles_that_fit_the_one_that_asks_most_is_taken(tmp_path: Path, unasked: Facts) -> None:
    profile_file(tmp_path, "any", "")
    profile_file(tmp_path, "twins", '[substrate]\ncuda = ["twin"]')
    profile_file(tmp_path, "none", "[match]\ngpu_count = 0\nnic_count = 0")
    profile_file(tmp_path, "large", "[match]\ngpu_count = 8")
    profiles = load_profiles(folder=tmp_path)
    assert choose_profile(profiles, unasked, {}).name == "none"
    assert choose_profile(profiles[:1] + profiles[3:], unasked, {"cuda": "twin"}).name == "twins"
    with pytest.raises(UsageError):
        choose_profile(profiles[1:2], unasked, {})


def test_a_profile_foresees_by_patterns(tmp_path: Path) -> None:
    profile_file(tmp_path, "one", '[[foreseen]]\nneed = "cuda.device(count_min=*)"\nreason = "* needed, 1 found"')
    profile = load_profile("one", folder=tmp_path)
    assert profile.foresees("cuda.device(count_min=2)", "2 CUDA devices needed, 1 found")
    assert not profile.foresees("cuda.device(count_min=2)", "cuda does not answer: timeout")
    assert not profile.foresees("cuda.vmm", "2 CUDA devices needed, 1 found")


@pytest.mark.parametrize(
    "text",
    [
        "[match]\ngpus = 1",
        '[substrate]\ncuda = ["soft"]',
        '[[routes]]\nenough = "some"',
        "cases_min = true",
        "[match",
    ],
)
def test_a_malformed_profile_is_refused(tmp_path: Path, text: str) -> None:
    profile_file(tmp_path, "bad", text)
    with pytest.raises(UsageError) as caught:
        load_profile("bad", folder=tmp_path)
    assert caught.value.reason is Reason.MALFORMED


def test_a_profile_that_does_not_exist_names_those_that_do(tmp_path: Path) -> None:
    profile_file(tmp_path, "one", "")
    with pytest.raises(UsageError, match="choose from one"):
        load_profile("../one", folder=tmp_path)


def test_error_of_a_nic_keeps_no_frames() -> None:
    failure = ApiError(api=Api.VERBS, operation="ibv_open_device", status=13, status_name="EACCES", errno=13)
    info = NicInfo(name="mlx5_0", node_guid="", driver=None, ports=(), error=failure)
    for _ in range(2):
        facts = ask._nic(info, {})  # noqa: SLF001 - a NIC that cannot be opened needs a machine that has one.
        assert facts.failure is not None
        assert facts.failure.errno == 13
    assert failure.__traceback__ is None
