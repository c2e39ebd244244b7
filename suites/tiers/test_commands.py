"""The commands of ``gdrkit tiers``: their output for people, their JSON output and their exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from support.tier_world import make_configuration

from gdrkit.cli import main
from gdrkit.tiers import DEFAULT_TIERS

if TYPE_CHECKING:
    from pathlib import Path


class TiersCommand:
    """The command `gdrkit tiers` on three tiers. The slowest tier has one file."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self._capsys = capsys

    def run(self, *arguments: str, exit_code: int = 0) -> str:
        """Run the command, and require `exit_code`.

        Return its standard output. If `exit_code` is not 0, add its standard error.
        """
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main(["tiers", *arguments])
        output = self._capsys.readouterr()
        assert exit_info.value.code == exit_code, output.out + output.err
        return output.out + (output.err if exit_code else "")

    def run_json(self, *arguments: str, exit_code: int = 0) -> Any:  # noqa: ANN401 - the JSON output of any command.
        """Run a command with ``--json`` and return its output."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main(["tiers", *arguments, "--json"])
        output = self._capsys.readouterr()
        assert exit_info.value.code == exit_code, output.out + output.err
        return json.loads(output.out)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> TiersCommand:
    """Return the command with three tiers, which the environment configures."""
    configuration = make_configuration(tmp_path)
    monkeypatch.setenv("GDRKIT_TIERS", " ".join(f"{tier.name}={tier.directory}" for tier in configuration.tiers))
    monkeypatch.setenv("GDRKIT_TIERS_CATALOGUE", str(configuration.catalogue))
    (tmp_path / "hdd" / "folder").mkdir()
    (tmp_path / "hdd" / "folder" / "file").write_bytes(b"x" * 10_000)
    return TiersCommand(tmp_path, capsys)


def test_file_is_pinned_migrated_and_listed(command: TiersCommand) -> None:
    assert "folder/file: hdd" in command.run("pin", "folder/file", "--dry-run")
    assert command.run_json("pin", "folder/file", "--in", "nvme") == {"folder/file": "nvme"}
    (move,) = command.run_json("migrate", "--dry-run")["moves"]
    assert (move["name"], move["source"], move["destination"], move["why"]) == ("folder/file", "hdd", "nvme", "pinned")
    assert "1 of 1 file would move" in command.run("migrate", "--dry-run")
    assert (command.root / "hdd" / "folder" / "file").exists()
    assert command.run_json("migrate")["moved"] == 1
    assert (command.root / "nvme" / "folder" / "file").read_bytes() == b"x" * 10_000
    assert {tier["name"]: tier["files"] for tier in command.run_json("status")} == {"nvme": 1, "ssd": 0, "hdd": 0}
    assert "nvme" in command.run("unpin", "folder/file")
    assert "1 of 1 file moved, 0 not moved" in command.run("migrate")
    assert "catalogue and disks agree" in command.run("check")


def test_named_files_move_to_the_named_tier(command: TiersCommand) -> None:
    assert "1 of 1 file would move" in command.run("migrate", "folder/file", "--to", "ssd", "--dry-run")
    assert command.run_json("migrate", "folder/file", "--to", "ssd")["moved"] == 1
    assert (command.root / "ssd" / "folder" / "file").exists()


def test_status_table_has_every_tier(command: TiersCommand) -> None:
    table = command.run("status")
    for text in ("nvme", str(command.root / "hdd"), ">= 100 accesses", "10 - 99 accesses", "0 - 9 accesses"):
        assert text in table


def test_check_with_a_finding_exits_with_1(command: TiersCommand) -> None:
    # This command creates the catalogue, so the catalogue does not know the file that is created next.
    command.run("status")
    (command.root / "ssd" / "new").write_bytes(b"")
    (finding,) = command.run_json("check", exit_code=1)
    assert (finding["kind"], finding["name"], finding["tier"], finding["mended"]) == ("unknown", "new", "ssd", False)
    assert "unknown" in command.run("check", "--repair", "--dry-run", exit_code=1)
    assert "repaired" in command.run("check", "--repair")
    assert command.run_json("check") == []


def test_bench_measures_each_tier_and_leaves_no_file(command: TiersCommand) -> None:
    speeds = command.run_json("bench", "--size", "8MiB")
    assert [speed["tier"] for speed in speeds] == list(DEFAULT_TIERS)
    assert all(speed["read_gb_per_s"] > 0 and speed["latency_us_median"] > 0 for speed in speeds)
    assert "stated" in command.run("bench", "--size", "8MiB")
    assert not list(command.root.rglob("bench*"))


@pytest.mark.parametrize(
    ("arguments", "exit_code", "error_text"),
    [
        (["pin", "nothing"], 1, "ENOENT"),
        (["pin", "../outside"], 2, "a name must be a relative path"),
        (["pin", "folder/file", "--in", "tape"], 2, "must be one of 'nvme', 'ssd', 'hdd', not 'tape'"),
        (["migrate", "folder/file"], 2, "--to"),
        (["migrate", "--to", "ssd"], 2, "--to"),
        (["bench", "--size", "much"], 2, "a size must be a number, with or without a unit"),
        (["run", "--rate", "1KiB"], 2, "the rate limit must be at least 64 KiB per second"),
        (["run", "--quiet-hours", "night"], 2, "quiet hours must be two different times of day"),
        (["run", "--interval-s", "0"], 2, "interval_s must be positive"),
        (["run", "--watch", "always"], 2, "'always' is not one of"),
        (["status", "--tier", "x"], 2, "a tier must be NAME=DIRECTORY"),
        (["status", "--config", "/nowhere.toml"], 2, "cannot be read"),
        (["status", "--tier", "nvme=/nowhere/at/all"], 3, "mount its file system"),
    ],
)
def test_invalid_command_prints_its_error(
    command: TiersCommand, arguments: list[str], exit_code: int, error_text: str
) -> None:
    assert error_text in command.run(*arguments, exit_code=exit_code)


def test_file_in_use_stays_and_exit_code_is_0(command: TiersCommand) -> None:
    command.run("pin", "folder/file", "--in", "nvme")
    with (command.root / "hdd" / "folder" / "file").open("r+b"):
        result = command.run_json("migrate")
    assert (result["moved"], result["refused"][0]["reason"]) == (0, "busy")
