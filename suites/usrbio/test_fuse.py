"""The FUSE mount of an agent: files through the kernel, publications by links, and the refusal of other users."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import subprocess
import sys
import uuid
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.application import KINDS, Application
from support.other_user import open_folder, run_program
from support.processes import wait_until
from support.raw_usrbio import AgentProcess
from support.storage import storage_server

from gdrkit import pattern, usrbio
from gdrkit.harness.needs import cuda, host, needs, verbs
from gdrkit.units import KIB, MIB
from gdrkit.usrbio import virtual

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs(verbs.nic(), host.fuse)
MEMORY_KINDS = ["host", pytest.param("device", marks=needs(verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export))]
TIMEOUT = timedelta(seconds=30)
SHARED = Path("/dev/shm")  # noqa: S108 - the folder of shm_open(3).


def mounted(path: Path) -> bool:
    return any(f" {path} " in line for line in Path("/proc/self/mountinfo").read_text().splitlines())


def submit_semaphores(mount: Path) -> list[Path]:
    return [link.readlink() for link in (mount / "3fs-virt" / "iovs").iterdir() if link.name.startswith("submit-ios")]


class SharedBlock:
    """Shared memory without the resource tracker process of ``multiprocessing.shared_memory``."""

    def __init__(self, length_bytes: int) -> None:
        self.name = f"gdrkit-case-{uuid.uuid4()}"
        self.path = SHARED / self.name
        with self.path.open("w+b") as file:
            file.truncate(length_bytes)
            self._mapped = mmap.mmap(file.fileno(), length_bytes)
        self.buf = memoryview(self._mapped)

    def close(self) -> None:
        self.buf.release()
        self._mapped.close()
        self.path.unlink()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of the mount and of the store."""
    for name in ("mount", "store"):
        (tmp_path / name).mkdir()
    return tmp_path / "mount", tmp_path / "store"


def start(folders: tuple[Path, Path]) -> AgentProcess:
    mount, store = folders
    return AgentProcess(mount, "--store", str(store), "--fuse")


@pytest.fixture
def agent(folders: tuple[Path, Path]) -> Iterator[AgentProcess]:
    with start(folders) as running:
        semaphores = submit_semaphores(folders[0])
        yield running
    assert running.process.returncode == 0, running.errors
    assert not mounted(folders[0])
    assert not any(path.exists() for path in semaphores)


@pytest.fixture
def opened(agent: AgentProcess) -> Iterator[int]:
    """A registered descriptor of a file with 1 MiB of the pattern."""
    (agent.mount / "file").write_bytes(pattern.payload(MIB, seed=1))
    fd = os.open(agent.mount / "file", os.O_RDWR)
    with contextlib.closing(os.fdopen(fd, "r+b", buffering=0)):
        usrbio.register_fd(fd)
        yield fd
        usrbio.deregister_fd(fd)


def test_written_file_is_the_same_in_mount_and_store(agent: AgentProcess, folders: tuple[Path, Path]) -> None:
    written = pattern.payload(3 * MIB + 5, seed=2)
    (agent.mount / "file").write_bytes(written)
    assert (agent.mount / "file").read_bytes() == written
    assert (folders[1] / "file").read_bytes() == written
    assert (agent.mount / "file").stat().st_ino == (folders[1] / "file").stat().st_ino
    assert usrbio.extract_mount_point(agent.mount / "file") == str(agent.mount)


@pytest.mark.parametrize("kind", [KINDS[0]])
def test_ring_and_mount_have_the_same_bytes(agent: AgentProcess, opened: int, kind: str) -> None:
    with Application(agent.mount, kind=kind, length_bytes=MIB) as application:
        assert application.read((opened, 0, 0, MIB)) == [MIB]
        application.check(0, MIB, seed=1, file_offset=0)
        application.write_pattern(0, 64 * KIB, seed=3, file_offset=4096)
        assert application.write((opened, 0, 4096, 64 * KIB)) == [64 * KIB]
    # The kernel has not cached the file.
    assert os.pread(opened, 64 * KIB, 4096) == pattern.payload(64 * KIB, seed=3, offset_bytes=4096)


@pytest.mark.parametrize("kind", MEMORY_KINDS)
def test_files_of_a_remote_server_are_read_and_written(folders: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    mount, store = folders
    with storage_server(store, tmp_path / "log", "--listen", "127.0.0.1:0") as service:
        token = store / ".gdrkit" / "token"
        with AgentProcess(mount, "--server", service.address, "--token-file", str(token)) as agent:
            (mount / "file").write_bytes(pattern.payload(MIB, seed=4))
            fd = os.open(mount / "file", os.O_RDWR)
            with contextlib.closing(os.fdopen(fd, "r+b", buffering=0)):
                usrbio.register_fd(fd)
                with Application(mount, kind=kind, length_bytes=MIB) as application:
                    assert application.read((fd, 0, 0, MIB)) == [MIB]
                    application.check(0, MIB, seed=4, file_offset=0)
                    application.write_pattern(0, 64 * KIB, seed=5, file_offset=4097)
                    assert application.write((fd, 0, 4097, 64 * KIB)) == [64 * KIB]
                    service.kill()
                    assert application.read((fd, 0, 0, MIB)) == [-errno.EREMOTEIO]
                usrbio.deregister_fd(fd)
        assert agent.process.returncode == 0, agent.errors
    original = pattern.payload(MIB, seed=4)
    written = pattern.payload(64 * KIB, seed=5, offset_bytes=4097)
    assert (store / "file").read_bytes() == original[:4097] + written + original[4097 + 64 * KIB :]


def test_symbolic_link_is_a_publication(agent: AgentProcess, opened: int) -> None:
    published = agent.mount / "3fs-virt" / "iovs"
    with contextlib.closing(SharedBlock(64 * KIB)) as shm:
        with usrbio.make_iovec(shm, str(agent.mount)) as iov, usrbio.make_ioring(str(agent.mount), 4) as ring:
            assert (published / iov.id).readlink() == shm.path
            done = ring.prepare(iov[:], read=True, fd=opened, off=0).submit().wait(min_results=1, timeout=TIMEOUT)
            assert [each.result for each in done] == [64 * KIB]
            pattern.check(bytes(shm.buf), seed=1)
        assert iov.id not in {link.name for link in published.iterdir()}


@pytest.mark.parametrize(
    ("name", "target", "number"),
    [
        pytest.param(str(uuid.uuid4()), str(SHARED / "missing"), errno.ENOENT, id="no-memory"),
        pytest.param(str(uuid.uuid4()), "/etc/passwd", errno.EINVAL, id="no-shared-memory"),
        pytest.param("no-uuid", str(SHARED / "x"), errno.EINVAL, id="no-name"),
    ],
)
def test_refused_publication_is_the_errno_of_symlink(agent: AgentProcess, name: str, target: str, number: int) -> None:
    link = agent.mount / "3fs-virt" / "iovs" / name
    with pytest.raises(OSError, match=name) as refused:
        link.symlink_to(target)
    assert refused.value.errno == number
    assert not link.is_symlink()


def test_link_is_removed_when_its_process_ends(agent: AgentProcess) -> None:
    script = """
import os, sys
from multiprocessing import shared_memory, resource_tracker
from gdrkit import usrbio
shm = shared_memory.SharedMemory(create=True, size=4096)
iov = usrbio.make_iovec(shm, sys.argv[1])
print(iov.id, flush=True)
shm.unlink()
sys.stdin.read()
os._exit(0)
"""
    command = [sys.executable, "-c", script, str(agent.mount)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        link = agent.mount / "3fs-virt" / "iovs" / name
        assert link.is_symlink()
        process.kill()
        process.wait()
    # The agent removes the link some time after the end of the process.
    wait_until(lambda: not link.is_symlink(), "the link of the killed process is removed", timeout_s=60)


def test_submit_link_cannot_be_removed(agent: AgentProcess) -> None:
    with pytest.raises(PermissionError):
        (agent.mount / "3fs-virt" / "iovs" / "submit-ios").unlink()


def test_ioctls_of_3fs_return_their_values(agent: AgentProcess, opened: int) -> None:
    assert struct.unpack("=I", fcntl.ioctl(opened, virtual.GET_MAGIC, bytes(4)))[0] == virtual.MAGIC
    assert struct.unpack("=I", fcntl.ioctl(opened, virtual.GET_IOCTL_VERSION, bytes(4)))[0] == 1
    assert struct.unpack("=I", fcntl.ioctl(opened, virtual.GET_PATH_OFFSET, bytes(4)))[0] == len(str(agent.mount))
    assert fcntl.ioctl(opened, virtual.GET_MOUNT_NAME, bytes(32)).rstrip(b"\0") == agent.mount.name.encode()
    assert usrbio.is_hf3fs(opened)
    assert usrbio.force_fsync(opened) == 0
    usrbio.punch_hole(opened, [0], [4096])
    assert os.pread(opened, 4096, 0) == bytes(4096)
    usrbio.hardlink(agent.mount / "file", agent.mount / "second")
    assert (agent.mount / "second").stat().st_ino == os.fstat(opened).st_ino


def test_rm_rf_removes_a_folder_with_its_contents(agent: AgentProcess) -> None:
    (agent.mount / "folder" / "inner").mkdir(parents=True)
    for number in range(20):
        (agent.mount / "folder" / "inner" / str(number)).touch()
    (agent.mount / "3fs-virt" / "rm-rf" / "now").symlink_to(agent.mount / "folder")
    assert not (agent.mount / "folder").exists()


@pytest.mark.parametrize("target", ["/etc", "folder", "{mount}/../x", "{mount}/3fs-virt/iovs", "{mount}/"])
def test_rm_rf_outside_of_the_files_is_refused(agent: AgentProcess, target: str) -> None:
    with pytest.raises(OSError, match="now") as refused:
        (agent.mount / "3fs-virt" / "rm-rf" / "now").symlink_to(target.format(mount=agent.mount))
    assert refused.value.errno in {errno.EINVAL, errno.EPERM}


@needs(host.capability("CAP_SETUID"))
def test_other_user_is_refused_by_the_kernel() -> None:
    with open_folder() as folder:
        for name in ("mount", "store"):
            (folder / name).mkdir()
        script = (
            "import os, sys\nfrom support.other_user import become_unprivileged\nbecome_unprivileged()\n"
            "print(os.listdir(sys.argv[2]))\nos.listdir(sys.argv[1])\n"
        )
        with start((folder / "mount", folder / "store")):
            result = run_program(script, str(folder / "mount"), str(folder))
    assert result.returncode != 0
    assert "mount" in result.stdout
    assert "PermissionError" in result.stderr


def test_mount_of_a_killed_agent_is_replaced(folders: tuple[Path, Path]) -> None:
    with start(folders) as first:
        semaphores = submit_semaphores(folders[0])
        first.kill()
    assert mounted(folders[0])
    with start(folders) as second:
        (second.mount / "file").write_bytes(b"content")
        assert second.terminate() == 0
    assert not mounted(folders[0])
    assert not any(path.exists() for path in semaphores)


def test_stale_mount_behind_a_symbolic_link_is_unmounted(folders: tuple[Path, Path]) -> None:
    mount, store = folders
    link = mount.parent / "link"
    link.symlink_to(mount.parent, target_is_directory=True)
    with start(folders) as killed:
        killed.kill()
    with start((link / "mount", store)) as agent:
        assert mounted(mount)
        assert agent.terminate() == 0, agent.errors
    assert not mounted(mount)


def test_ended_agent_leaves_no_private_folder(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    private = folders[0].parent / "run"
    private.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(private))
    with start(folders) as agent:
        assert len(list(private.glob("gdrkit-*/*"))) == 1
        assert agent.terminate() == 0, agent.errors
    assert list(private.glob("gdrkit-*/*")) == []
