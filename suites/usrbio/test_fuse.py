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
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.application import Application
from support.other_user import folder_for_all_users, run_program
from support.processes import wait_until
from support.raw_usrbio import AgentProcess
from support.storage import run_storage_server

from gdrkit import pattern, usrbio
from gdrkit.errors import UsageError
from gdrkit.harness.needs import cuda, host, needs, verbs
from gdrkit.units import KIB, MIB
from gdrkit.usrbio import virtual

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs(verbs.nic(), host.fuse)
MEMORY_KINDS = ["host", pytest.param("device", marks=needs(verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export))]
TIMEOUT = timedelta(seconds=30)
SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - the folder of shm_open(3).


def is_mounted(path: Path) -> bool:
    """Return whether a file system is mounted on a folder."""
    return any(f" {path} " in line for line in Path("/proc/self/mountinfo").read_text().splitlines())


def list_submit_semaphores(mount: Path) -> list[Path]:
    """Return the files of the submit semaphores of a mount."""
    return [link.readlink() for link in (mount / "3fs-virt" / "iovs").iterdir() if link.name.startswith("submit-ios")]


class SharedBlock:
    """Shared memory like ``multiprocessing.shared_memory``, but without its resource tracker process."""

    def __init__(self, length_bytes: int) -> None:
        self.name = f"gdrkit-case-{uuid.uuid4()}"
        self.path = SHM_FOLDER / self.name
        with self.path.open("w+b") as file:
            file.truncate(length_bytes)
            self._mapping = mmap.mmap(file.fileno(), length_bytes)
        self.buf = memoryview(self._mapping)

    def close(self) -> None:
        self.buf.release()
        self._mapping.close()
        self.path.unlink()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of the mount and of the store."""
    for name in ("mount", "store"):
        (tmp_path / name).mkdir()
    return tmp_path / "mount", tmp_path / "store"


def start_agent(folders: tuple[Path, Path]) -> AgentProcess:
    mount, store = folders
    return AgentProcess(mount, "--store", str(store), "--fuse")


@pytest.fixture
def agent(folders: tuple[Path, Path]) -> Iterator[AgentProcess]:
    """Yield a running agent. After its end, check that it has unmounted and has removed its semaphores."""
    mount, _store = folders
    with start_agent(folders) as agent_process:
        semaphore_files = list_submit_semaphores(mount)
        yield agent_process
    assert agent_process.process.returncode == 0, agent_process.error_output
    assert not is_mounted(mount)
    assert not any(path.exists() for path in semaphore_files)


@pytest.fixture
def registered_fd(agent: AgentProcess) -> Iterator[int]:
    """A registered descriptor of a file with 1 MiB of the pattern."""
    (agent.mount / "file").write_bytes(pattern.payload(MIB, seed=1))
    fd = os.open(agent.mount / "file", os.O_RDWR)
    with contextlib.closing(os.fdopen(fd, "r+b", buffering=0)):
        usrbio.register_fd(fd)
        yield fd
        usrbio.deregister_fd(fd)


def test_written_file_is_the_same_in_mount_and_store(agent: AgentProcess, folders: tuple[Path, Path]) -> None:
    _mount, store = folders
    written_bytes = pattern.payload(3 * MIB + 5, seed=2)
    (agent.mount / "file").write_bytes(written_bytes)
    assert (agent.mount / "file").read_bytes() == written_bytes
    assert (store / "file").read_bytes() == written_bytes
    assert (agent.mount / "file").stat().st_ino == (store / "file").stat().st_ino
    assert usrbio.extract_mount_point(agent.mount / "file") == str(agent.mount)


@pytest.mark.parametrize("memory_kind", ["host"])
def test_ring_and_mount_have_the_same_bytes(agent: AgentProcess, registered_fd: int, memory_kind: str) -> None:
    with Application(agent.mount, memory_kind=memory_kind, length_bytes=MIB) as application:
        assert application.read((registered_fd, 0, 0, MIB)) == [MIB]
        application.check(0, MIB, seed=1, file_offset=0)
        application.write_pattern(0, 64 * KIB, seed=3, file_offset=4096)
        assert application.write((registered_fd, 0, 4096, 64 * KIB)) == [64 * KIB]
    # This comparison fails if the kernel has cached the old bytes of the file.
    assert os.pread(registered_fd, 64 * KIB, 4096) == pattern.payload(64 * KIB, seed=3, offset_bytes=4096)


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS)
def test_files_of_a_remote_server_are_read_and_written(
    folders: tuple[Path, Path], tmp_path: Path, memory_kind: str
) -> None:
    mount, store = folders
    with run_storage_server(store, tmp_path / "log", "--listen", "127.0.0.1:0") as service:
        token_file = store / ".gdrkit" / "token"
        with AgentProcess(mount, "--server", service.address, "--token-file", str(token_file)) as agent:
            (mount / "file").write_bytes(pattern.payload(MIB, seed=4))
            fd = os.open(mount / "file", os.O_RDWR)
            with contextlib.closing(os.fdopen(fd, "r+b", buffering=0)):
                usrbio.register_fd(fd)
                with Application(mount, memory_kind=memory_kind, length_bytes=MIB) as application:
                    assert application.read((fd, 0, 0, MIB)) == [MIB]
                    application.check(0, MIB, seed=4, file_offset=0)
                    application.write_pattern(0, 64 * KIB, seed=5, file_offset=4097)
                    assert application.write((fd, 0, 4097, 64 * KIB)) == [64 * KIB]
                    service.kill()
                    assert application.read((fd, 0, 0, MIB)) == [-errno.EREMOTEIO]
                usrbio.deregister_fd(fd)
        assert agent.process.returncode == 0, agent.error_output
    original_bytes = pattern.payload(MIB, seed=4)
    written_bytes = pattern.payload(64 * KIB, seed=5, offset_bytes=4097)
    assert (store / "file").read_bytes() == original_bytes[:4097] + written_bytes + original_bytes[4097 + 64 * KIB :]


def test_agent_ends_although_its_server_was_killed(folders: tuple[Path, Path], tmp_path: Path) -> None:
    mount, store = folders
    with run_storage_server(store, tmp_path / "log", "--listen", "127.0.0.1:0") as service:
        token_file = store / ".gdrkit" / "token"
        with AgentProcess(mount, "--server", service.address, "--token-file", str(token_file)) as agent:
            (mount / "file").write_bytes(bytes(KIB))
            with (mount / "file").open("rb"):
                service.kill()
                assert agent.terminate() == 0, agent.error_output


def test_symbolic_link_is_a_publication(agent: AgentProcess, registered_fd: int) -> None:
    links_folder = agent.mount / "3fs-virt" / "iovs"
    with contextlib.closing(SharedBlock(64 * KIB)) as shm:
        with usrbio.make_iovec(shm, str(agent.mount)) as iov, usrbio.make_ioring(str(agent.mount), 4) as ring:
            assert (links_folder / iov.id).readlink() == shm.path
            completed_slices = (
                ring.prepare(iov[:], read=True, fd=registered_fd, off=0).submit().wait(min_results=1, timeout=TIMEOUT)
            )
            assert [iov_slice.result for iov_slice in completed_slices] == [64 * KIB]
            pattern.check(bytes(shm.buf), seed=1)
        assert iov.id not in {link.name for link in links_folder.iterdir()}


def test_shared_memory_is_closed_before_its_iovec(agent: AgentProcess, registered_fd: int) -> None:
    # The function read_file of 3FS closes the memory while it still holds the completed slice.
    with contextlib.closing(SharedBlock(64 * KIB)) as shm, usrbio.make_ioring(str(agent.mount), 4) as ring:
        iov = usrbio.make_iovec(shm, str(agent.mount))
        ring.prepare(iov[:], read=True, fd=registered_fd, off=0)
        with pytest.raises(BufferError):
            shm.buf.release()  # The prepared operation uses the memory.
        (completed_slice,) = ring.submit().wait(min_results=1, timeout=TIMEOUT)
        with memoryview(completed_slice), pytest.raises(BufferError):
            shm.buf.release()
        pattern.check(bytes(shm.buf), seed=1)
    with pytest.raises(BufferError, match="released"):
        memoryview(completed_slice)
    iov.close()
    assert completed_slice.result == 64 * KIB


def test_released_memory_has_no_more_operations(agent: AgentProcess, registered_fd: int) -> None:
    with usrbio.make_ioring(str(agent.mount), 4) as ring:
        with contextlib.closing(SharedBlock(64 * KIB)) as shm:
            iov = usrbio.make_iovec(shm, str(agent.mount))
        with pytest.raises(ValueError, match="released memoryview"):
            ring.prepare(iov[:], read=True, fd=registered_fd, off=0)
        iov.close()


def test_wrapped_buffer_of_another_size_is_refused(agent: AgentProcess, registered_fd: int) -> None:
    with contextlib.closing(SharedBlock(64 * KIB)) as shm, usrbio.make_ioring(str(agent.mount), 4) as ring:
        buffer = bytearray(64 * KIB)
        resizable_shm: Any = SimpleNamespace(name=shm.name, buf=buffer)
        with usrbio.make_iovec(resizable_shm, str(agent.mount)) as iov:
            buffer.extend(bytes(64 * KIB))
            with pytest.raises(UsageError, match="has moved or has another size: wrap it again"):
                ring.prepare(iov[:], read=True, fd=registered_fd, off=0)


@pytest.mark.parametrize(
    ("name", "target", "expected_errno"),
    [
        pytest.param(str(uuid.uuid4()), str(SHM_FOLDER / "missing"), errno.ENOENT, id="no-memory"),
        pytest.param(str(uuid.uuid4()), "/etc/passwd", errno.EINVAL, id="no-shared-memory"),
        pytest.param("no-uuid", str(SHM_FOLDER / "x"), errno.EINVAL, id="no-name"),
    ],
)
def test_refused_publication_is_the_errno_of_symlink(
    agent: AgentProcess, name: str, target: str, expected_errno: int
) -> None:
    link = agent.mount / "3fs-virt" / "iovs" / name
    with pytest.raises(OSError, match=name) as error_info:
        link.symlink_to(target)
    assert error_info.value.errno == expected_errno
    assert not link.is_symlink()


def test_link_is_removed_when_its_process_ends(agent: AgentProcess) -> None:
    publishing_program = """
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
    command = [sys.executable, "-c", publishing_program, str(agent.mount)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        link_name = process.stdout.readline().strip()
        link = agent.mount / "3fs-virt" / "iovs" / link_name
        assert link.is_symlink()
        process.kill()
        process.wait()
    # The agent removes the link some time after the end of the process.
    wait_until(lambda: not link.is_symlink(), "the link of the killed process is removed", timeout_s=60)


def test_submit_link_cannot_be_removed(agent: AgentProcess) -> None:
    with pytest.raises(PermissionError):
        (agent.mount / "3fs-virt" / "iovs" / "submit-ios").unlink()


def test_ioctls_of_3fs_return_their_values(agent: AgentProcess, registered_fd: int) -> None:
    assert struct.unpack("=I", fcntl.ioctl(registered_fd, virtual.GET_MAGIC, bytes(4)))[0] == virtual.MAGIC
    assert struct.unpack("=I", fcntl.ioctl(registered_fd, virtual.GET_IOCTL_VERSION, bytes(4)))[0] == 1
    assert struct.unpack("=I", fcntl.ioctl(registered_fd, virtual.GET_PATH_OFFSET, bytes(4)))[0] == len(
        str(agent.mount)
    )
    assert fcntl.ioctl(registered_fd, virtual.GET_MOUNT_NAME, bytes(32)).rstrip(b"\0") == agent.mount.name.encode()
    assert usrbio.is_hf3fs(registered_fd)
    assert usrbio.force_fsync(registered_fd) == 0
    usrbio.punch_hole(registered_fd, [0], [4096])
    assert os.pread(registered_fd, 4096, 0) == bytes(4096)
    usrbio.hardlink(agent.mount / "file", agent.mount / "second")
    assert (agent.mount / "second").stat().st_ino == os.fstat(registered_fd).st_ino


def test_rm_rf_removes_a_folder_with_its_contents(agent: AgentProcess) -> None:
    (agent.mount / "folder" / "inner").mkdir(parents=True)
    for file_index in range(20):
        (agent.mount / "folder" / "inner" / str(file_index)).touch()
    # When a client makes a link in rm-rf, the agent removes the target of the link.
    (agent.mount / "3fs-virt" / "rm-rf" / "now").symlink_to(agent.mount / "folder")
    assert not (agent.mount / "folder").exists()


@pytest.mark.parametrize("target", ["/etc", "folder", "{mount}/../x", "{mount}/3fs-virt/iovs", "{mount}/"])
def test_rm_rf_outside_of_the_files_is_refused(agent: AgentProcess, target: str) -> None:
    with pytest.raises(OSError, match="now") as error_info:
        (agent.mount / "3fs-virt" / "rm-rf" / "now").symlink_to(target.format(mount=agent.mount))
    assert error_info.value.errno in {errno.EINVAL, errno.EPERM}


@needs(host.capability("CAP_SETUID"))
def test_other_user_is_refused_by_the_kernel() -> None:
    with folder_for_all_users() as folder:
        for name in ("mount", "store"):
            (folder / name).mkdir()
        listing_program = (
            "import os, sys\nfrom support.other_user import become_unprivileged\nbecome_unprivileged()\n"
            "print(os.listdir(sys.argv[2]))\nos.listdir(sys.argv[1])\n"
        )
        with start_agent((folder / "mount", folder / "store")):
            result = run_program(listing_program, str(folder / "mount"), str(folder))
    assert result.returncode != 0
    assert "mount" in result.stdout
    assert "PermissionError" in result.stderr


@needs(host.capability("CAP_SYS_ADMIN"), host.program("unshare", "--mount", "echo", "allowed"))
def test_agent_ends_although_a_container_has_its_mount(folders: tuple[Path, Path]) -> None:
    mount, store = folders
    with AgentProcess(mount, "--store", str(store), "--fuse") as agent:
        # This shell has a copy of the mount in its own mount namespace, like a process in a container.
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo ready; read line"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as container:
            assert container.stdout is not None
            assert container.stdout.readline() == "ready\n"
            assert agent.terminate() == 0, agent.error_output


def test_mount_of_a_killed_agent_is_replaced(folders: tuple[Path, Path]) -> None:
    mount, _store = folders
    with start_agent(folders) as killed_agent:
        semaphore_files = list_submit_semaphores(mount)
        killed_agent.kill()
    assert is_mounted(mount)
    with start_agent(folders) as next_agent:
        (next_agent.mount / "file").write_bytes(b"content")
        assert next_agent.terminate() == 0
    assert not is_mounted(mount)
    assert not any(path.exists() for path in semaphore_files)


def test_stale_mount_behind_a_symbolic_link_is_unmounted(folders: tuple[Path, Path]) -> None:
    mount, store = folders
    link = mount.parent / "link"
    link.symlink_to(mount.parent, target_is_directory=True)
    with start_agent(folders) as killed_agent:
        killed_agent.kill()
    with start_agent((link / "mount", store)) as agent:
        assert is_mounted(mount)
        assert agent.terminate() == 0, agent.error_output
    assert not is_mounted(mount)


def test_ended_agent_leaves_no_private_folder(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    mount, _store = folders
    runtime_folder = mount.parent / "run"
    runtime_folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    with start_agent(folders) as agent:
        assert len(list(runtime_folder.glob("gdrkit-*/*"))) == 1
        assert agent.terminate() == 0, agent.error_output
    assert list(runtime_folder.glob("gdrkit-*/*")) == []
