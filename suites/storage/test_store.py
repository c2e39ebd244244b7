"""Tests of the store of a storage server, without a server: its format, its methods, and the files that it refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Reason, UsageError
from gdrkit.storage.messages import FileStat
from gdrkit.storage.store import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    """Yield a new store in the folder `store`."""
    (tmp_path / "store").mkdir()
    with FileStore(tmp_path / "store") as new_store:
        yield new_store


@pytest.fixture
def root(store: FileStore, tmp_path: Path) -> Path:
    return tmp_path / "store"


def get_errno(call: Callable[[], object]) -> int | None:
    """Make a call that must fail, and return its errno."""
    try:
        call()
    except OSError as error:
        return error.errno
    pytest.fail("the call did not fail")


def read_attributes(path: Path) -> FileStat:
    """Read the attributes that the store must return for a path, by lstat(2)."""
    status = path.lstat()
    return FileStat(
        inode=status.st_ino,
        mode=status.st_mode,
        size_bytes=status.st_size,
        links=status.st_nlink,
        uid=status.st_uid,
        gid=status.st_gid,
        allocated_bytes=status.st_blocks * 512,
        access_time_ns=status.st_atime_ns,
        modification_time_ns=status.st_mtime_ns,
        change_time_ns=status.st_ctime_ns,
    )


def test_chunk_size_is_fixed_by_the_first_open(tmp_path: Path) -> None:
    with FileStore(tmp_path) as new_store:
        assert new_store.chunk_bytes == 4096
    for requested_bytes in (None, 4096):
        with FileStore(tmp_path, chunk_bytes=requested_bytes) as reopened_store:
            assert reopened_store.chunk_bytes == 4096
    with pytest.raises(UsageError, match="chunks of 4096 bytes, not 8192"):
        FileStore(tmp_path, chunk_bytes=8192)


def test_chunk_size_is_kept_in_store_json(tmp_path: Path) -> None:
    with FileStore(tmp_path, chunk_bytes=65536):
        assert json.loads((tmp_path / ".gdrkit" / "store.json").read_text()) == {"format": 1, "chunk_bytes": 65536}
    with FileStore(tmp_path) as reopened_store:
        assert reopened_store.chunk_bytes == 65536


@pytest.mark.parametrize(
    "store_json_text",
    [
        "",
        "[1]",
        '{"format": 2, "chunk_bytes": 4096}',
        '{"chunk_bytes": 4096}',
        '{"format": 1}',
        '{"format": 1, "chunk_bytes": true}',
        '{"format": 1, "chunk_bytes": "4096"}',
    ],
)
def test_store_json_of_another_format_is_refused(tmp_path: Path, store_json_text: str) -> None:
    FileStore(tmp_path).close()
    (tmp_path / ".gdrkit" / "store.json").write_text(store_json_text)
    with pytest.raises(UsageError) as error_info:
        FileStore(tmp_path)
    assert error_info.value.reason is Reason.MALFORMED


def test_root_that_is_a_file_is_enotdir(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as error_info:
        FileStore(tmp_path / "file")
    assert error_info.value.filename == str(tmp_path / "file")


def test_token_has_256_bits_and_stays(tmp_path: Path) -> None:
    with FileStore(tmp_path) as new_store:
        token = new_store.token
    assert len(bytes.fromhex(token)) == 32
    with FileStore(tmp_path) as reopened_store:
        assert reopened_store.token == token


def test_store_is_locked_until_it_is_closed(tmp_path: Path) -> None:
    locked_store = FileStore(tmp_path)
    assert get_errno(lambda: FileStore(tmp_path)) == errno.EWOULDBLOCK
    locked_store.close()
    locked_store.close()
    FileStore(tmp_path).close()


def test_socket_of_a_store_is_in_its_folder(store: FileStore, root: Path) -> None:
    assert store.default_socket() == root.resolve() / ".gdrkit" / "server.sock"


@pytest.mark.parametrize(
    ("flags", "may_read", "may_write"),
    [(os.O_RDONLY, True, False), (os.O_WRONLY, False, True), (os.O_RDWR, True, True)],
)
def test_open_gives_the_requested_access(
    store: FileStore, root: Path, flags: int, *, may_read: bool, may_write: bool
) -> None:
    (root / "file").write_bytes(b"content")
    file = store.open("file", flags=flags)
    assert (file.may_read, file.may_write) == (may_read, may_write)
    # A file for writing is opened for reading too: a write of a part of a chunk reads the rest of the chunk.
    access_mode = fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_ACCMODE
    assert access_mode == (os.O_RDWR if may_write else os.O_RDONLY)
    assert (root / "file").read_bytes() == b"content"


def test_open_creates_truncates_and_is_exclusive(store: FileStore, root: Path) -> None:
    assert get_errno(lambda: store.open("file", flags=os.O_RDWR)) == errno.ENOENT
    # The store drops the set-user-ID bit of a mode.
    store.open("file", flags=os.O_RDWR | os.O_CREAT, mode=0o4751)
    assert stat.S_IMODE((root / "file").stat().st_mode) == 0o751
    assert get_errno(lambda: store.open("file", flags=os.O_RDWR | os.O_CREAT | os.O_EXCL)) == errno.EEXIST
    (root / "file").write_bytes(b"content")
    store.open("file", flags=os.O_RDWR | os.O_CREAT)
    assert (root / "file").stat().st_size == 7
    store.open("file", flags=os.O_RDWR | os.O_TRUNC)
    assert (root / "file").stat().st_size == 0


@pytest.mark.parametrize(
    ("open_flags", "read", "write", "is_allowed"),
    [
        (os.O_RDONLY, True, False, True),
        (os.O_RDONLY, False, True, False),
        (os.O_RDONLY, True, True, False),
        (os.O_WRONLY, True, False, False),
        (os.O_WRONLY, False, True, True),
        (os.O_WRONLY, True, True, False),
        (os.O_RDWR, True, True, True),
        (os.O_RDWR | os.O_APPEND, False, True, True),
        (os.O_PATH, True, False, False),
        (os.O_PATH, False, True, False),
    ],
)
def test_adopted_descriptor_must_permit_the_access(
    store: FileStore, root: Path, open_flags: int, *, read: bool, write: bool, is_allowed: bool
) -> None:
    (root / "file").write_bytes(b"content")
    descriptor = os.open(root / "file", open_flags)
    try:
        if is_allowed:
            file = store.adopt(descriptor, read=read, write=write)
            assert (file.may_read, file.may_write) == (read, write)
            # With O_APPEND, pwrite(2) would ignore the offset.
            assert fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_APPEND == 0
        else:
            assert get_errno(lambda: store.adopt(descriptor, read=read, write=write)) == errno.EACCES
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("name", ["../outside", ".gdrkit/token", "3fs-virt/file"])
def test_adopted_file_must_be_in_the_store(store: FileStore, root: Path, name: str) -> None:
    (root / "3fs-virt").mkdir()
    for path in (root / "3fs-virt" / "file", root.parent / "outside"):
        path.touch()
    with (root / name).open("rb") as file:
        assert get_errno(lambda: store.adopt(file.fileno(), read=True, write=False)) == errno.EXDEV


def test_calls_return_the_attributes_of_the_file(store: FileStore, root: Path) -> None:
    (root / "file").write_bytes(b"content" * 1000)
    assert store.stat("") == read_attributes(root)
    assert store.stat("file") == read_attributes(root / "file")
    assert store.mkdir("folder", 0o4711) == read_attributes(root / "folder")
    assert stat.S_IMODE((root / "folder").stat().st_mode) == 0o711
    assert store.symlink("link", "file") == store.stat("link") == read_attributes(root / "link")
    assert stat.S_ISLNK(store.stat("link").mode)
    assert store.link("file", "folder/second") == read_attributes(root / "file")
    assert store.chmod("file", 0o6640) == read_attributes(root / "file")
    assert stat.S_IMODE((root / "file").stat().st_mode) == 0o640
    assert store.utimens("file", access_time_ns=5, modification_time_ns=7) == read_attributes(root / "file")


def test_hard_link_of_a_symbolic_link_is_a_symbolic_link(store: FileStore, root: Path) -> None:
    (root / "file").touch()
    store.symlink("link", "file")
    assert stat.S_ISLNK(store.link("link", "second").mode)
    assert store.readlink("second") == "file"
    assert (root / "file").stat().st_nlink == 1


def test_links_keep_names_that_are_not_utf8(store: FileStore, root: Path) -> None:
    name = os.fsdecode(b"\xff")
    store.symlink(name, name)
    assert store.readlink(name) == name
    assert (root / name).readlink() == Path(name)


def test_rename_replaces_exchanges_or_is_exclusive(store: FileStore, root: Path) -> None:
    for name in ("a", "b"):
        (root / name).write_text(name)
    assert get_errno(lambda: store.rename("a", "b", exclusive=True, exchange=False)) == errno.EEXIST
    store.rename("a", "b", exclusive=False, exchange=True)
    assert [(root / name).read_text() for name in ("a", "b")] == ["b", "a"]
    assert get_errno(lambda: store.rename("a", "c", exclusive=False, exchange=True)) == errno.ENOENT
    store.rename("a", "b", exclusive=False, exchange=False)
    assert (root / "b").read_text() == "b"
    assert not (root / "a").exists()
    store.rename("b", "c", exclusive=True, exchange=False)
    assert (root / "c").read_text() == "b"
    assert get_errno(lambda: store.rename("b", "d", exclusive=False, exchange=False)) == errno.ENOENT


def test_full_reply_is_the_last_if_no_entry_is_left(store: FileStore, root: Path) -> None:
    # A reply has at most 63 KiB. Each entry counts as 80 bytes plus its name as a JSON string. These names have 48
    # bytes with their quotes, so 504 entries are exactly 63 KiB. The second argument of list() is the last name of the
    # previous reply.
    names = [f"{index:046}" for index in range(504)]
    for name in names:
        (root / name).touch()
    reply = store.list("", None)
    assert ([entry.name for entry in reply.entries], reply.more) == (names, False)
    (root / f"{504:046}").touch()
    reply = store.list("", None)
    assert ([entry.name for entry in reply.entries], reply.more) == (names, True)
    reply = store.list("", names[-1])
    assert ([entry.name for entry in reply.entries], reply.more) == ([f"{504:046}"], False)


def test_entries_of_a_folder_have_inode_and_type(store: FileStore, root: Path) -> None:
    store.mkdir("folder", 0o700)
    store.symlink("link", "nowhere")
    (root / "file").touch()
    file_types = {"file": stat.S_IFREG, "folder": stat.S_IFDIR, "link": stat.S_IFLNK}
    inodes_and_types = {entry.name: (entry.inode, entry.kind) for entry in store.list("", None).entries}
    assert inodes_and_types == {
        name: ((root / name).lstat().st_ino, file_type) for name, file_type in file_types.items()
    }
    assert [entry.name for entry in store.list("", "file").entries] == ["folder", "link"]
    assert store.list("folder", None).entries == ()


def test_reserved_names_are_hidden_only_in_the_root(store: FileStore, root: Path) -> None:
    for name in (".gdrkit", "3fs-virt"):
        (root / name).mkdir(exist_ok=True)
        (root / "folder" / name).mkdir(parents=True)
        assert get_errno(partial(store.stat, name)) == errno.ENOENT
        assert stat.S_ISDIR(store.stat(f"folder/{name}").mode)
    assert [entry.name for entry in store.list("", None).entries] == ["folder"]
    assert [entry.name for entry in store.list("folder", None).entries] == [".gdrkit", "3fs-virt"]


@pytest.mark.parametrize("path", ["/file", "..", "../file", "folder/..", "folder/../file", "/"])
def test_path_that_leaves_the_store_is_exdev(store: FileStore, path: str) -> None:
    store.mkdir("folder", 0o700)
    for call in (store.stat, store.rmdir, store.unlink, lambda path: store.list(path, None)):
        assert get_errno(partial(call, path)) == errno.EXDEV
    assert get_errno(lambda: store.open(path, flags=os.O_RDONLY)) == errno.EXDEV


@pytest.mark.parametrize("path", [".", "folder/.", "./", "./."])
def test_path_that_ends_with_a_dot_is_einval(store: FileStore, path: str) -> None:
    store.mkdir("folder", 0o700)
    for call in (store.stat, store.rmdir, store.unlink, lambda path: store.mkdir(path, 0o700)):
        assert get_errno(partial(call, path)) == errno.EINVAL


def test_slash_at_the_end_of_a_folder_is_accepted(store: FileStore, root: Path) -> None:
    store.mkdir("folder//", 0o700)
    assert store.stat("folder/") == read_attributes(root / "folder")
    store.rmdir("folder/")
    assert not (root / "folder").exists()


def test_times_that_are_not_given_are_kept(store: FileStore, root: Path) -> None:
    store.mkdir("folder", 0o700)
    store.symlink("link", "file")
    (root / "file").touch()
    for name in ("file", "folder", "link", ""):
        path = root / name if name else root
        store.utimens(name, access_time_ns=10**18, modification_time_ns=2 * 10**18)
        store.utimens(name, access_time_ns=None, modification_time_ns=3 * 10**18)
        assert (path.lstat().st_atime_ns, path.lstat().st_mtime_ns) == (10**18, 3 * 10**18)
        store.utimens(name, access_time_ns=4 * 10**18, modification_time_ns=None)
        assert (path.lstat().st_atime_ns, path.lstat().st_mtime_ns) == (4 * 10**18, 3 * 10**18)


def test_space_is_the_result_of_statvfs(store: FileStore, root: Path) -> None:
    statfs_reply, statvfs_result = store.statfs(), os.statvfs(root)
    assert (statfs_reply.block_bytes, statfs_reply.blocks, statfs_reply.files) == (
        statvfs_result.f_frsize,
        statvfs_result.f_blocks,
        statvfs_result.f_files,
    )
    assert statfs_reply.name_bytes_max == statvfs_result.f_namemax
    # Other processes use the file system during the case, so the numbers of free blocks and files may change.
    assert statfs_reply.blocks_free == pytest.approx(statvfs_result.f_bfree, rel=0.1)
    assert statfs_reply.blocks_available == pytest.approx(statvfs_result.f_bavail, rel=0.1)
    assert statfs_reply.files_free == pytest.approx(statvfs_result.f_ffree, rel=0.1)
    if statvfs_result.f_bfree != statvfs_result.f_bavail:
        assert statfs_reply.blocks_free > statfs_reply.blocks_available
