"""``gdrkit tiers``: what it prints, what programs read, and how it ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from support.tier_world import configuration_of

from gdrkit.cli import main
from gdrkit.tiers import SEED

if TYPE_CHECKING:
    from pathlib import Path


class Shell:
    """Three tiers, the slowest of which has a file, and the commands on them."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self._capsys = capsys

    def run(self, *arguments: str, code: int = 0) -> str:
        """What a command prints; also to standard error, when it ends with another code than 0."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["tiers", *arguments])
        said = self._capsys.readouterr()
        assert ended.value.code == code, said.out + said.err
        return said.out + (said.err if code else "")

    def as_json(self, *arguments: str, code: int = 0) -> Any:  # noqa: ANN401 - what it says.
        """The same for programs."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["tiers", *arguments, "--json"])
        said = self._capsys.readouterr()
        assert ended.value.code == code, said.out + said.err
        return json.loads(said.out)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    made = configuration_of(tmp_path)
    monkeypatch.setenv("GDRKIT_TIERS", " ".join(f"{tier.name}={tier.directory}" for tier in made.tiers))
    monkeypatch.setenv("GDRKIT_TIERS_CATALOGUE", str(made.catalogue))
    (tmp_path / "hdd" / "folder").mkdir()
    (tmp_path / "hdd" / "folder" / "file").write_bytes(b"x" * 10_000)
    return Shell(tmp_path, capsys)


def test_a_file_is_pinned_migrated_and_shown(shell: Shell) -> None:
    assert "folder/file: hdd" in shell.run("pin", "folder/file", "--dry-run")
    assert shell.as_json("pin", "folder/file", "--in", "nvme") == {"folder/file": "nvme"}
    (move,) = shell.as_json("migrate", "--dry-run")["moves"]
    assert (move["name"], move["source"], move["destination"], move["why"]) == ("folder/file", "hdd", "nvme", "pinned")
    assert "1 of 1 files would move" in shell.run("migrate", "--dry-run")
    assert (shell.root / "hdd" / "folder" / "file").exists()
    assert shell.as_json("migrate")["moved"] == 1
    assert (shell.root / "nvme" / "folder" / "file").read_bytes() == b"x" * 10_000
    assert {tier["name"]: tier["files"] for tier in shell.as_json("status")} == {"nvme": 1, "ssd": 0, "hdd": 0}
    assert "nvme" in shell.run("unpin", "folder/file")
    assert "1 of 1 files moved, 0 had to stay" in shell.run("migrate")
    assert "catalogue and disks agree" in shell.run("check")


def test_named_files_are_moved_where_one_says(shell: Shell) -> None:
    assert "1 of 1 files would move" in shell.run("migrate", "folder/file", "--to", "ssd", "--dry-run")
    assert shell.as_json("migrate", "folder/file", "--to", "ssd")["moved"] == 1
    assert (shell.root / "ssd" / "folder" / "file").exists()


def test_the_tables_name_everything(shell: Shell) -> None:
    shown = shell.run("status")
    for word in ("nvme", str(shell.root / "hdd"), ">= 100 accesses", "10 - 99 accesses", "0 - 9 accesses"):
        assert word in shown


def test_a_check_that_finds_something_ends_with_1(shell: Shell) -> None:
    shell.run("status")
    (shell.root / "ssd" / "new").write_bytes(b"")
    (found,) = shell.as_json("check", code=1)
    assert (found["kind"], found["name"], found["tier"], found["mended"]) == ("unknown", "new", "ssd", False)
    assert "unknown" in shell.run("check", "--repair", "--dry-run", code=1)
    assert "mended" in shell.run("check", "--repair")
    assert shell.as_json("check") == []


def test_the_bench_measures_each_tier_and_says_of_what(shell: Shell) -> None:
    found = shell.as_json("bench", "--size", "8MiB")
    assert [each["tier"] for each in found] == list(SEED)
    assert all(each["read_gb_per_s"] > 0 and each["latency_us_median"] > 0 for each in found)
    shown = shell.run("bench", "--size", "8MiB")
    assert "stated" in shown
    # Nothing of it stays.
    assert not list(shell.root.rglob("bench*"))


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["pin", "nothing"], 1, "ENOENT"),
        (["pin", "../outside"], 2, "no name"),
        (["pin", "folder/file", "--in", "tape"], 2, "no tier 'tape'"),
        (["migrate", "folder/file"], 2, "--to"),
        (["migrate", "--to", "ssd"], 2, "--to"),
        (["bench", "--size", "much"], 2, "no size"),
        (["status", "--tier", "x"], 2, "no tier"),
        (["status", "--config", "/nowhere.toml"], 2, "cannot be read"),
        (["status", "--tier", "nvme=/nowhere/at/all"], 3, "mount it"),
    ],
)
def test_what_cannot_be_is_one_clear_line(shell: Shell, arguments: list[str], code: int, says: str) -> None:
    assert says in shell.run(*arguments, code=code)


def test_a_file_in_use_stays_and_is_no_failure(shell: Shell) -> None:
    shell.run("pin", "folder/file", "--in", "nvme")
    with (shell.root / "hdd" / "folder" / "file").open("r+b"):
        found = shell.as_json("migrate")
    assert (found["moved"], found["refused"][0]["reason"]) == (0, "busy")
