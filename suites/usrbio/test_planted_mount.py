"""An agent refuses links and files that another user planted in its mount, and changes no other folder."""

from __future__ import annotations

import errno
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.other_user import folder_for_all_users, run_program
from support.raw_usrbio import list_shared_memory_files

from gdrkit.errors import SetupMissing
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.usrbio.agent.mount import AgentMount
from gdrkit.usrbio.fuse.agent import private_folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def virtual_folder(tmp_path: Path) -> Path:
    """The folder ``3fs-virt`` of a mount that an agent has already served."""
    AgentMount(tmp_path).close()
    return tmp_path / "3fs-virt"


def open_and_get_error(virtual_folder: Path) -> SetupMissing:
    """Open the mount, which must fail, and return the error."""
    with pytest.raises(SetupMissing) as error_info:
        AgentMount(virtual_folder.parent).close()
    assert error_info.value.what_to_do
    return error_info.value


@pytest.fixture
def victim_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of the mount, with a link and a file. Planted links point to this folder."""
    folder = tmp_path_factory.mktemp("victim")
    (folder / "link").symlink_to("/etc/hostname")
    (folder / "file").write_text("content")
    return folder


@pytest.mark.parametrize("name", ["iovs", "publications"])
def test_link_in_place_of_agents_folder_is_refused(virtual_folder: Path, victim_folder: Path, name: str) -> None:
    (virtual_folder / name).rmdir()
    (virtual_folder / name).symlink_to(victim_folder)
    error = open_and_get_error(virtual_folder)
    assert (error.errno, error.arguments["path"]) == (errno.ELOOP, str(virtual_folder / name))
    assert sorted(path.name for path in victim_folder.iterdir()) == ["file", "link"]


def test_link_in_place_of_the_virtual_folder_is_refused(virtual_folder: Path, victim_folder: Path) -> None:
    for path in virtual_folder.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    virtual_folder.rmdir()
    virtual_folder.symlink_to(victim_folder)
    assert open_and_get_error(virtual_folder).errno == errno.ELOOP
    assert sorted(path.name for path in victim_folder.iterdir()) == ["file", "link"]


def test_link_in_place_of_agents_lock_is_refused(virtual_folder: Path, victim_folder: Path) -> None:
    (virtual_folder / "agent.lock").unlink()
    (virtual_folder / "agent.lock").symlink_to(victim_folder / "created")
    assert open_and_get_error(virtual_folder).errno == errno.ELOOP
    assert not (victim_folder / "created").exists()


def test_mount_that_others_can_write_needs_a_sticky_bit(virtual_folder: Path) -> None:
    virtual_folder.parent.chmod(0o777)
    assert "chmod +t" in open_and_get_error(virtual_folder).what_to_do
    virtual_folder.parent.chmod(0o1777)
    with AgentMount(virtual_folder.parent):
        assert len(list_shared_memory_files(virtual_folder.parent)) == 3
        for path in (virtual_folder, virtual_folder / "iovs", virtual_folder / "publications"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700


PLANTING_PROGRAM = """
import os, sys
from support.other_user import become_unprivileged
become_unprivileged()
os.mkdir(sys.argv[1], 0o755)
os.symlink("/etc", os.path.join(sys.argv[1], "iovs"))
"""


@needs(host.capability("CAP_SETUID"))
def test_virtual_folder_of_another_user_is_refused() -> None:
    with folder_for_all_users() as mount:
        mount.chmod(0o1777)
        completed = run_program(PLANTING_PROGRAM, str(mount / "3fs-virt"))
        assert completed.returncode == 0, completed.stderr
        assert "user 65534" in open_and_get_error(mount / "3fs-virt").detail


def test_virtual_folder_that_others_can_write_is_refused(virtual_folder: Path) -> None:
    virtual_folder.chmod(0o777)
    assert "0777" in open_and_get_error(virtual_folder).detail
    virtual_folder.chmod(0o755)
    AgentMount(virtual_folder.parent).close()


def test_record_that_is_a_link_removes_nothing(virtual_folder: Path, victim_folder: Path) -> None:
    (virtual_folder / "publications" / "record").symlink_to(victim_folder / "file")
    AgentMount(virtual_folder.parent).close()
    assert (victim_folder / "file").read_text() == "content"
    assert list((virtual_folder / "publications").iterdir()) == []


@needs(verbs.nic())
@pytest.mark.parametrize("name", ["iovs", "server.lock"])
def test_agent_command_names_the_planted_link(virtual_folder: Path, victim_folder: Path, name: str) -> None:
    if name == "iovs":
        (virtual_folder / name).rmdir()
    (virtual_folder / name).symlink_to(victim_folder / ("created" if name == "server.lock" else ""))
    command = [
        sys.executable,
        "-m",
        "gdrkit",
        "agent",
        str(virtual_folder.parent),
        "--store",
        str(virtual_folder.parent),
    ]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert completed.returncode == 3
    assert f"To do: remove {virtual_folder / name}" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert sorted(path.name for path in victim_folder.iterdir()) == ["file", "link"]


def test_runtime_folder_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = private_folder(tmp_path / "mount")
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    folder.parent.chmod(0o770)
    with pytest.raises(SetupMissing):
        private_folder(tmp_path / "mount")
