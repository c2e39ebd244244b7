"""A capture replays the reads of its machine, and a hostile capture cannot make gdrkit read other files."""

from __future__ import annotations

import errno
import gzip
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from inventory.healthy_machine import make_machine

from gdrkit import serialization
from gdrkit.cli import main
from gdrkit.errors import Reason, UsageError
from gdrkit.host import DiskFiles, HostTree
from gdrkit.inventory import (
    RULES,
    Capture,
    CapturedFiles,
    Machine,
    RecordedReads,
    Recorder,
    captured_machine,
    diagnose,
    parse_capture,
    read_capture,
    topology,
    write_capture,
)

if TYPE_CHECKING:
    from pathlib import Path


def make_recorded_machine(root: Path) -> Machine:
    """Return the healthy host of inventory.healthy_machine, whose reads are recorded."""
    healthy_host = make_machine(root)
    return replace(healthy_host, files=Recorder(DiskFiles(root)))


@pytest.mark.parametrize("file_name", ["capture.json", "capture.json.gz"])
def test_checks_of_a_capture_equal_those_of_the_machine(tmp_path: Path, file_name: str) -> None:
    healthy_host = make_recorded_machine(tmp_path / "host")
    diagnosis, pci_topology = diagnose(healthy_host), topology(healthy_host)
    write_capture(tmp_path / file_name, healthy_host.capture())
    replayed_machine = captured_machine(read_capture(tmp_path / file_name))
    assert diagnose(replayed_machine) == diagnosis
    assert topology(replayed_machine) == pci_topology
    assert replayed_machine.facts == healthy_host.facts


def test_facts_are_saved_and_replayed_by_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run_gdrkit(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code in (0, 1, 4)
        return capsys.readouterr().out

    capture_path = str(tmp_path / "machine.json.gz")
    facts = json.loads(run_gdrkit("facts", "--no-apis", "--save", capture_path, "--json"))
    assert json.loads(run_gdrkit("facts", "--replay", capture_path, "--json")) == facts
    diagnosis = json.loads(run_gdrkit("doctor", "--replay", capture_path, "--json"))
    assert len(diagnosis["findings"]) == len(RULES)
    assert "places" in json.loads(run_gdrkit("topology", "--replay", capture_path, "--json"))


def test_unread_path_differs_from_absent_path(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    recorder = Recorder(DiskFiles(tmp_path))
    tree = HostTree.of(recorder)
    tree.names("/sys")
    tree.text("/proc/cmdline")
    replayed_tree = HostTree.of(CapturedFiles(recorder.reads))
    assert (replayed_tree.names("/sys"), replayed_tree.text("/proc/cmdline"), len(replayed_tree.unreadable)) == (
        (),
        None,
        0,
    )
    # The names in /sys were read, so the capture shows that /sys/module does not exist.
    assert replayed_tree.text("/sys/module") is None
    assert not replayed_tree.unreadable
    # The capture shows nothing about this path.
    assert replayed_tree.text("/etc/os-release") is None
    assert [unreadable_file.errno for unreadable_file in replayed_tree.unreadable] == [errno.ENODATA]


def test_read_error_is_captured(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()  # A folder cannot be read as a file.
    recorder = Recorder(DiskFiles(tmp_path))
    assert HostTree.of(recorder).text("/file") is None
    replayed_tree = HostTree.of(CapturedFiles(recorder.reads))
    assert replayed_tree.text("/file") is None
    assert [unreadable_file.errno for unreadable_file in replayed_tree.unreadable] == [errno.EISDIR]


def test_links_of_a_capture_stay_inside_it() -> None:
    recorded_reads = RecordedReads(
        links={
            "/a": "/etc/passwd",
            "/b": "../../../../../etc/passwd",
            "/c": "/c",
            "/d": "e",
            "/e": "d",
            "/f": "inside",
        },
        texts={"/inside/name": "inside"},
    )
    files = CapturedFiles(recorded_reads)
    for path in ("/a", "/b", "/c"):
        with pytest.raises(OSError, match=r".") as error_info:
            files.read(path)
        assert error_info.value.errno in (errno.ENODATA, errno.ENOENT)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        files.read("/d/x")
    assert files.read("/f/name") == b"inside"


HOSTILE_READS: dict[str, dict[str, Any]] = {
    "a relative path": {"texts": {"etc/passwd": ""}},
    "a path with dots": {"texts": {"/sys/../etc/passwd": ""}},
    "a path with a zero": {"links": {"/a\0b": "c"}},
    "a name with a path": {"folders": {"/sys": ["../etc"]}},
    "an invalid name": {"folders": {"/sys": [".."]}},
    "not base64": {"binaries": {"/config": "%%%"}},
    "an unknown type of read": {"refused": {"write": {"/a": 13}}},
    "a number as text": {"texts": {"/a": 5}},
    "an unknown field": {"devices": {}},
}


@pytest.mark.parametrize("example_name", HOSTILE_READS)
def test_hostile_capture_is_one_clear_error(example_name: str) -> None:
    capture_data = {"schema_version": 1, "origin": "a case", "answers": HOSTILE_READS[example_name]}
    with pytest.raises(UsageError, match=r"^capture") as error_info:
        parse_capture(json.dumps(capture_data).encode())
    assert error_info.value.reason is Reason.MALFORMED


MALFORMED_FILES = {
    "nested": b'{"a":' * 100_000,
    "too long when decompressed": gzip.compress(b" " * (300 << 20), compresslevel=1),
    "cut off": gzip.compress(b'{"schema_version": 1}' * 1000)[:-20],
    "not gzip": b"\x1f\x8b\x08\x00garbage and more of it",
    "lone surrogate": b'{"schema_version": 1, "origin": "\\ud800", "answers": {}}',
    "another version": b'{"schema_version": 9, "origin": "", "answers": {}}',
    "empty": b"",
    "random bytes": bytes(range(256)),
}


@pytest.mark.parametrize("example_name", MALFORMED_FILES)
def test_malformed_file_is_one_clear_error(example_name: str) -> None:
    with pytest.raises(UsageError) as error_info:
        parse_capture(MALFORMED_FILES[example_name], name="file")
    assert error_info.value.reason is Reason.MALFORMED


def test_unreadable_path_is_one_clear_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path / "pipe"):
        with pytest.raises(UsageError):
            read_capture(path)


def test_capture_is_read_back_as_the_same_value(tmp_path: Path) -> None:
    capture = make_recorded_machine(tmp_path / "host").capture()
    assert serialization.from_json_data(Capture, json.loads(json.dumps(serialization.to_json_data(capture)))) == capture
