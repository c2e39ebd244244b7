"""The folder ``3fs-virt`` of a mount, without an agent: its creation, its checks, and the removal of old files."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.other_user import folder_for_all_users, run_program

from gdrkit.errors import ApiError, GdrkitError, Reason, SetupMissing, UsageError
from gdrkit.harness.needs import host, needs
from gdrkit.host import PrivateFolder, ProcessIdentity, process_identity
from gdrkit.usrbio.agent.agent_error import AgentError
from gdrkit.usrbio.agent.mount import AgentMount, LinkFolder, check_mount
from gdrkit.usrbio.agent.shared_memory import adopt_unnamed, open_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - the folder of shm_open(3).
SEMAPHORE_LINKS = ["submit-ios.ph", "submit-ios", "submit-ios.pl"]
OTHER_UID = os.geteuid() + 1


def catch_errno(call: Callable[[], object]) -> int:
    """Return the errno of the AgentError that a call raises."""
    with pytest.raises(AgentError) as error_info:
        call()
    return error_info.value.errno


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A file in /dev/shm with the name of an iov and one byte."""
    path = SHM_FOLDER / f"hf3fs-iov-{uuid.uuid4()}"
    path.write_bytes(b"x")
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def links(tmp_path: Path) -> Iterator[LinkFolder]:
    """Yield an empty folder of links."""
    with (
        PrivateFolder.below(tmp_path / "links") as links_folder,
        PrivateFolder.below(tmp_path / "records") as records_folder,
    ):
        yield LinkFolder(links_folder, records_folder)


def get_identity(process_id: int) -> ProcessIdentity:
    """Return the identity of a running process."""
    identity = process_identity(process_id)
    assert identity is not None
    return identity


def get_identity_of_ended_process() -> ProcessIdentity:
    """Return the identity of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        return get_identity(child.pid)


def open_unnamed_file(folder: Path = SHM_FOLDER, *, length_bytes: int = 1, flags: int = os.O_RDWR) -> int:
    """Return a descriptor of a new file without a name."""
    writable_fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(writable_fd, length_bytes)
    descriptor = os.open(f"/proc/self/fd/{writable_fd}", flags)
    os.close(writable_fd)
    return descriptor


def list_open_descriptors() -> set[str]:
    """Return the numbers of the open descriptors of this process."""
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the names are enough.


def is_open(descriptor: int) -> bool:
    """Return whether the descriptor is open in this process."""
    return Path(f"/proc/self/fd/{descriptor}").exists()


# ------------------------------------------------------------------------------------------------------------ the mount


def test_mount_makes_private_folders_and_semaphores(tmp_path: Path) -> None:
    with AgentMount(tmp_path) as mount:
        assert mount.virtual_folder == tmp_path / "3fs-virt"
        assert mount.socket_path == tmp_path / "3fs-virt" / "agent.sock"
        for folder in (mount.virtual_folder, mount.virtual_folder / "iovs", mount.virtual_folder / "publications"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        targets = [(mount.virtual_folder / "iovs" / name).readlink() for name in SEMAPHORE_LINKS]
        assert [f"/{target.name.removeprefix('sem.')}" for target in targets] == list(mount.semaphore_names)
        assert len(set(targets)) == 3
        assert [stat.S_IMODE(target.stat().st_mode) for target in targets] == [0o600] * 3
    assert not any(target.exists() for target in targets)
    assert list((tmp_path / "3fs-virt" / "iovs").iterdir()) == []
    mount.close()


def test_second_agent_of_a_mount_is_ebusy(tmp_path: Path) -> None:
    with AgentMount(tmp_path):
        with pytest.raises(SetupMissing, match="end the agent") as refusal:
            AgentMount(tmp_path)
        error = refusal.value
        assert (error.operation, error.errno, error.reason) == ("flock", errno.EBUSY, Reason.BUSY)
        assert error.status_name == "EBUSY"
        assert dict(error.arguments) == {"path": str(tmp_path / "3fs-virt" / "agent.lock")}
    AgentMount(tmp_path).close()


def test_missing_mount_is_enoent(tmp_path: Path) -> None:
    with pytest.raises(GdrkitError) as refusal:
        AgentMount(tmp_path / "missing")
    assert isinstance(refusal.value, SetupMissing)
    assert (refusal.value.operation, refusal.value.errno) == ("mkdir", errno.ENOENT)
    assert dict(refusal.value.arguments) == {"path": str(tmp_path / "missing" / "3fs-virt")}
    assert (refusal.value.reason, refusal.value.what_to_do) == (Reason.OTHER, f"create the folder {tmp_path}/missing")


def test_other_error_of_mkdir_is_an_api_error(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as refusal:
        AgentMount(tmp_path / ("x" * 256))
    assert not isinstance(refusal.value, SetupMissing)
    assert (refusal.value.operation, refusal.value.errno) == ("mkdir", errno.ENAMETOOLONG)


MOUNT_PROGRAM = """
import sys
from pathlib import Path
from gdrkit.errors import SetupMissing
from gdrkit.usrbio.agent.mount import AgentMount
from support.other_user import become_unprivileged
become_unprivileged()
try:
    AgentMount(Path(sys.argv[1]))
except SetupMissing as error:
    print(error.operation, error.errno, error.reason.name, error.what_to_do)
"""


@needs(host.capability("CAP_SETUID"))
def test_mount_without_the_right_to_write_is_eacces() -> None:
    with folder_for_all_users() as folder:
        result = run_program(MOUNT_PROGRAM, str(folder))
    assert result.stdout.startswith(f"mkdir {errno.EACCES} NO_PERMISSION give this user the right"), result.stderr


def test_mount_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ApiError, match="name a folder") as error_info:
        AgentMount(tmp_path / "file")
    assert error_info.value.errno == errno.ENOTDIR


def test_agent_folder_is_removed_at_close(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with AgentMount(tmp_path, agent_folder=folder) as mount:
        assert mount.virtual_folder == folder / "3fs-virt"
        os.close(mount.open("server.lock", os.O_RDWR | os.O_CREAT))
    assert not folder.exists()
    assert not (tmp_path / "3fs-virt").exists()


def test_agent_folder_that_is_not_empty_stays(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with AgentMount(tmp_path, agent_folder=folder):
        (folder / "3fs-virt" / "file").touch()
    assert (folder / "3fs-virt" / "file").exists()


def test_sockets_and_links_of_a_killed_agent_are_removed(tmp_path: Path) -> None:
    AgentMount(tmp_path).close()
    virtual_folder = tmp_path / "3fs-virt"
    semaphore = SHM_FOLDER / f"sem.hf3fs-submit-ios.{uuid.uuid4()}"
    semaphore.touch()
    other_file = tmp_path / "sem.hf3fs-submit-ios"
    other_file.touch()
    for name in ("agent.sock", "server.sock", "iovs/file"):
        (virtual_folder / name).touch()
    (virtual_folder / "iovs" / "submit-ios.ph").symlink_to(semaphore)
    (virtual_folder / "iovs" / "submit-ios").symlink_to(other_file)
    (virtual_folder / "iovs" / str(uuid.uuid4())).symlink_to(tmp_path)
    with AgentMount(tmp_path) as mount:
        assert sorted(entry.name for entry in (virtual_folder / "iovs").iterdir()) == ["file", *sorted(SEMAPHORE_LINKS)]
        assert not mount.socket_path.exists()
        assert not (virtual_folder / "server.sock").exists()
        assert not semaphore.exists()
        assert other_file.exists()


# An agent removes the memory that a record names only if the owner has ended, the inode is the same, and the file has
# the name of an iov.
@pytest.mark.parametrize("case", ["removed", "another file", "owner runs", "other name"])
def test_memory_of_an_ended_client_is_removed(tmp_path: Path, memory_path: Path, case: str) -> None:
    AgentMount(tmp_path).close()
    owner = get_identity(os.getpid()) if case == "owner runs" else get_identity_of_ended_process()
    status = memory_path.stat()
    shared_path = SHM_FOLDER / f"gdrkit-case-{uuid.uuid4()}" if case == "other name" else memory_path
    if shared_path != memory_path:
        memory_path.rename(shared_path)
    record = {
        "boot_id": owner.boot_id.hex(),
        "process_id": owner.process_id,
        "namespace": owner.pid_namespace,
        "started_ticks": owner.started_ticks,
        "shared": shared_path.name,
        "device": status.st_dev,
        "inode": status.st_ino + (case == "another file"),
    }
    record_path = tmp_path / "3fs-virt" / "publications" / "name"
    record_path.write_text(json.dumps(record))
    record_path.chmod(0o600)
    try:
        with AgentMount(tmp_path):
            assert shared_path.exists() == (case != "removed")
            assert record_path.exists() == (case == "owner runs")
    finally:
        shared_path.unlink(missing_ok=True)


@pytest.mark.parametrize("record_text", ["", "{", "[]", "{}", '{"boot_id": "x", "process_id": 1}', "null"])
def test_malformed_record_is_removed(tmp_path: Path, record_text: str) -> None:
    AgentMount(tmp_path).close()
    record_path = tmp_path / "3fs-virt" / "publications" / "name"
    record_path.write_text(record_text)
    record_path.chmod(0o600)
    with AgentMount(tmp_path):
        assert not record_path.exists()


def test_mount_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    assert check_mount(tmp_path / "link") == tmp_path.resolve()
    for name in ("file", "missing"):
        with pytest.raises(UsageError):
            check_mount(tmp_path / name)


# ---------------------------------------------------------------------------------------------------- memory of clients


def test_shared_memory_is_opened_with_its_attributes(memory_path: Path) -> None:
    shared = open_shared(str(memory_path), uid=os.geteuid())
    status = memory_path.stat()
    assert (shared.name, shared.length_bytes) == (memory_path.name, 1)
    assert shared.identity == (status.st_dev, status.st_ino)
    assert os.pread(shared.fd, 1, 0) == b"x"
    assert os.pwrite(shared.fd, b"y", 0) == 1
    assert not os.get_inheritable(shared.fd)
    fd = shared.fd
    shared.close()
    assert not is_open(fd)
    descriptors_before = list_open_descriptors()
    shared.close()
    assert list_open_descriptors() == descriptors_before


@pytest.mark.parametrize(
    "target", [f"{SHM_FOLDER}/", f"{SHM_FOLDER}/.", f"{SHM_FOLDER}/..", "/dev/x", "shm", f"{SHM_FOLDER}/a/b", ""]
)
def test_target_outside_of_dev_shm_is_einval(target: str) -> None:
    assert catch_errno(lambda: open_shared(target, uid=os.geteuid())) == errno.EINVAL


def test_target_that_is_not_memory_is_refused(memory_path: Path) -> None:
    descriptors_before = list_open_descriptors()

    def open_and_get_errno() -> int:
        return catch_errno(lambda: open_shared(str(memory_path), uid=os.geteuid()))

    memory_path.write_bytes(b"")
    assert open_and_get_errno() == errno.EINVAL
    memory_path.unlink()
    assert open_and_get_errno() == errno.ENOENT
    os.mkfifo(memory_path)
    assert open_and_get_errno() == errno.EINVAL
    memory_path.unlink()
    memory_path.symlink_to("/dev/null")
    assert open_and_get_errno() == errno.EINVAL
    memory_path.unlink()
    memory_path.mkdir()
    assert open_and_get_errno() == errno.EISDIR
    memory_path.rmdir()
    assert list_open_descriptors() == descriptors_before


def test_memory_of_another_user_is_eacces(memory_path: Path) -> None:
    descriptors_before = list_open_descriptors()
    assert catch_errno(lambda: open_shared(str(memory_path), uid=OTHER_UID)) == errno.EACCES
    assert list_open_descriptors() == descriptors_before


def test_only_the_same_memory_of_an_iov_is_removed(memory_path: Path) -> None:
    shared = open_shared(str(memory_path), uid=os.geteuid())
    memory_path.rename(memory_path.with_suffix(".old"))
    memory_path.write_bytes(b"new")
    shared.remove()
    assert memory_path.exists()
    memory_path.with_suffix(".old").rename(memory_path)
    shared.remove()
    shared.remove()
    shared.close()
    assert not memory_path.exists()


def test_unnamed_memory_gets_its_name(memory_path: Path) -> None:
    memory_path.unlink()
    shared = adopt_unnamed(str(memory_path), open_unnamed_file(), uid=os.geteuid())
    assert (shared.name, shared.length_bytes, shared.is_unnamed) == (memory_path.name, 1, True)
    shared.give_name()
    status = memory_path.stat()
    assert shared.identity == (status.st_dev, status.st_ino)
    assert Path(f"/proc/self/fd/{shared.fd}").readlink() == memory_path
    assert os.pwrite(shared.fd, b"y", 0) == 1
    assert not os.get_inheritable(shared.fd)
    shared.close()


def test_name_of_unnamed_memory_must_be_free(memory_path: Path) -> None:
    shared = adopt_unnamed(str(memory_path), open_unnamed_file(), uid=os.geteuid())
    assert catch_errno(shared.give_name) == errno.EEXIST
    shared.close()
    assert memory_path.read_bytes() == b"x"


# Each fault says which property of the target or of the descriptor is wrong.
@pytest.mark.parametrize(
    ("fault", "expected_errno"),
    [
        ("name", errno.EINVAL),
        ("folder", errno.EINVAL),
        ("empty", errno.EINVAL),
        ("read-only", errno.EINVAL),
        ("write-only", errno.EINVAL),
        ("path", errno.EINVAL),
        ("other file system", errno.EINVAL),
        ("named", errno.EINVAL),
        ("user", errno.EACCES),
    ],
)
def test_descriptor_of_other_memory_is_closed(
    tmp_path: Path, memory_path: Path, fault: str, expected_errno: int
) -> None:
    target = {"name": "/dev/shm/iov", "folder": f"/tmp/{memory_path.name}"}.get(fault, str(memory_path))  # noqa: S108
    flags = {"read-only": os.O_RDONLY, "write-only": os.O_WRONLY, "path": os.O_PATH}.get(fault, os.O_RDWR)
    if fault == "named":
        descriptor = os.open(memory_path, os.O_RDWR)
    else:
        folder = tmp_path if fault == "other file system" else SHM_FOLDER
        descriptor = open_unnamed_file(folder, length_bytes=int(fault != "empty"), flags=flags)
    uid = OTHER_UID if fault == "user" else os.geteuid()
    assert catch_errno(lambda: adopt_unnamed(target, descriptor, uid=uid)) == expected_errno
    assert not is_open(descriptor)


# ------------------------------------------------------------------------------------------------------------ the links


def test_existing_link_with_the_same_target_is_used(links: LinkFolder, tmp_path: Path) -> None:
    links.add("name", "gdr://target", owner=None, shared_file=None)
    links.add("name", "gdr://target", owner=None, shared_file=None)
    assert os.readlink(tmp_path / "links" / "name") == "gdr://target"  # noqa: PTH115 - a Path would merge the slashes.
    assert catch_errno(lambda: links.add("name", "other", owner=None, shared_file=None)) == errno.EEXIST
    assert os.readlink(tmp_path / "links" / "name") == "gdr://target"  # noqa: PTH115 - a Path would merge the slashes.
    links.remove("name", "other")
    assert (tmp_path / "links" / "name").is_symlink()
    links.remove("name", "gdr://target")
    assert list((tmp_path / "links").iterdir()) == []


def test_failed_link_has_the_errno_of_the_kernel(links: LinkFolder) -> None:
    assert catch_errno(lambda: links.add("a/b", "target", owner=None, shared_file=None)) == errno.ENOENT


def test_record_names_the_owner_of_a_link(links: LinkFolder, tmp_path: Path, memory_path: Path) -> None:
    owner = get_identity(os.getpid())
    shared = open_shared(str(memory_path), uid=os.geteuid())
    links.add("name", str(memory_path), owner=owner, shared_file=shared)
    status = memory_path.stat()
    assert json.loads((tmp_path / "records" / "name").read_text()) == {
        "boot_id": owner.boot_id.hex(),
        "process_id": os.getpid(),
        "namespace": owner.pid_namespace,
        "started_ticks": owner.started_ticks,
        "shared": memory_path.name,
        "device": status.st_dev,
        "inode": status.st_ino,
    }
    links.remove("name", str(memory_path))
    assert list((tmp_path / "records").iterdir()) == []
    assert memory_path.exists()
    shared.close()


def test_refused_link_leaves_no_record_and_no_name(links: LinkFolder, tmp_path: Path, memory_path: Path) -> None:
    memory_path.unlink()
    links.add("name", "other", owner=None, shared_file=None)
    shared = adopt_unnamed(str(memory_path), open_unnamed_file(), uid=os.geteuid())
    owner = get_identity(os.getpid())
    assert catch_errno(lambda: links.add("name", str(memory_path), owner=owner, shared_file=shared)) == errno.EEXIST
    shared.close()
    assert not memory_path.exists()
    assert list((tmp_path / "records").iterdir()) == []
