"""A store refuses links and files that another user planted in its folder, and changes nothing elsewhere."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.other_user import folder_for_all_users, run_program

from gdrkit.errors import SetupMissing, UsageError
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.storage.store import FileStore
from gdrkit.storage.token import read_token, read_token_file

if TYPE_CHECKING:
    from pathlib import Path

PLANTED_TOKEN = "0" * 64 + "\n"
# Entries of the private folder .gdrkit of a store: three files, and the folder `sums`.
PRIVATE_NAMES = ["lock", "store.json", "sums", "token"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder of a store that was opened once."""
    folder = tmp_path / "store"
    folder.mkdir()
    FileStore(folder).close()
    return folder


def open_and_get_error(root: Path) -> SetupMissing:
    """Open a store, which must fail, and return the error."""
    with pytest.raises(SetupMissing) as error_info:
        FileStore(root).close()
    assert error_info.value.what_to_do
    return error_info.value


@needs(verbs.nic())
@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_link_in_private_folder_of_store_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    private_folder, link_target = root / ".gdrkit", tmp_path / "elsewhere"
    (private_folder / name).rename(link_target)
    (private_folder / name).symlink_to(link_target)
    status_before = link_target.lstat()
    error = open_and_get_error(root)
    assert (error.errno, error.arguments["path"]) == (errno.ELOOP, str(private_folder / name))
    assert link_target.lstat() == status_before


@needs(verbs.nic())
@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_dangling_link_in_store_creates_nothing(root: Path, tmp_path: Path, name: str) -> None:
    private_folder = root / ".gdrkit"
    (private_folder / name).rmdir() if name == "sums" else (private_folder / name).unlink()
    (private_folder / name).symlink_to(tmp_path / "elsewhere")
    assert open_and_get_error(root).errno == errno.ELOOP
    assert not (tmp_path / "elsewhere").exists()


@needs(verbs.nic())
def test_link_in_place_of_private_folder_is_refused(root: Path, tmp_path: Path) -> None:
    (root / ".gdrkit").rename(tmp_path / "elsewhere")
    (root / ".gdrkit").symlink_to(tmp_path / "elsewhere")
    assert open_and_get_error(root).errno == errno.ELOOP


@needs(verbs.nic())
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602, 0o666])
def test_token_that_others_could_read_is_refused(root: Path, mode: int) -> None:
    token = root / ".gdrkit" / "token"
    token.write_text(PLANTED_TOKEN)
    token.chmod(mode)
    error = open_and_get_error(root)
    assert (error.errno, f"{mode:04o}" in error.detail) == (errno.EPERM, True)
    with pytest.raises(SetupMissing):
        read_token(root)
    token.unlink()
    with FileStore(root) as store:
        assert store.token == read_token(root) != PLANTED_TOKEN.strip()


# Program that creates the private folder of a store and a token as the unprivileged user, whose number is 65534.
PLANTING_PROGRAM = """
import os, sys
from support.other_user import become_unprivileged
become_unprivileged()
os.mkdir(sys.argv[1], 0o755)
with open(os.path.join(sys.argv[1], "token"), "w") as file:
    file.write("0" * 64)
"""


@needs(verbs.nic(), host.capability("CAP_SETUID"))
def test_store_folder_planted_by_another_user_is_refused() -> None:
    with folder_for_all_users() as root:
        root.chmod(0o1777)
        completed_process = run_program(PLANTING_PROGRAM, str(root / ".gdrkit"))
        assert completed_process.returncode == 0, completed_process.stderr
        assert "user 65534" in open_and_get_error(root).detail


@needs(verbs.nic(), host.capability("CAP_SETUID"))
@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_private_file_of_another_user_is_refused(root: Path, name: str) -> None:
    os.chown(root / ".gdrkit" / name, 65534, -1)
    error = open_and_get_error(root)
    assert (error.errno, "user 65534" in error.detail) == (errno.EPERM, True)


@needs(verbs.nic())
def test_shared_parent_without_sticky_bit_is_refused(root: Path) -> None:
    for mode in (0o777, 0o775, 0o2770):
        root.chmod(mode)
        assert "chmod +t" in open_and_get_error(root).what_to_do
    root.chmod(0o1777)
    FileStore(root).close()


@needs(verbs.nic())
def test_private_folder_is_made_private_or_refused(root: Path) -> None:
    private_folder = root / ".gdrkit"
    private_folder.chmod(0o755)
    FileStore(root).close()
    assert stat.S_IMODE(private_folder.stat().st_mode) == 0o700
    private_folder.chmod(0o770)
    assert "0770" in open_and_get_error(root).detail


@needs(verbs.nic())
def test_serve_names_the_planted_file_and_the_remedy(root: Path) -> None:
    (root / ".gdrkit" / "token").chmod(0o644)
    command = [sys.executable, "-m", "gdrkit", "serve", "--store", str(root)]
    completed_process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert completed_process.returncode == 3
    assert "0644" in completed_process.stderr
    assert "To do: remove" in completed_process.stderr
    assert "Traceback" not in completed_process.stderr


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n", b"x" * 300, b"two\nlines"])
def test_invalid_token_file_is_a_usage_error_with_its_path(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=str(path)):
        read_token_file(path)


@needs(host.fuse)
def test_agent_without_its_token_file_exits_with_code_2(tmp_path: Path) -> None:
    options = ["--server", "127.0.0.1:9", "--token-file", str(tmp_path / "missing")]
    command = [sys.executable, "-m", "gdrkit", "agent", str(tmp_path), *options]
    completed_process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert completed_process.returncode == 2
    assert f"open {tmp_path / 'missing'}: No such file or directory (ENOENT)" in completed_process.stderr
    assert "Traceback" not in completed_process.stderr
