"""Messages of the control connection of the storage service: one JSON object per frame, parsed strictly.

A session proceeds as follows:

1. The client opens a *control connection* (TCP, or a unix socket of mode 0600 whose peer must be this user or root) and
   sends :class:`StorageHello` with the endpoints of its queue pairs (``lanes``). The :class:`HelloReply` contains the
   secret of the session, the endpoints of the server's queue pairs in the same order, and the limits. The server sends
   this reply when its queue pairs are ready. The client connects its own queue pairs to them, and permits
   ``limits.reads_max`` concurrent RDMA READs of the server.
2. The client opens a *data connection* to the same address and sends :class:`Attach` with the secret. After the reply,
   the data connection carries only io requests and io replies (:mod:`gdrkit.storage.wire`).
3. All other requests use the control connection. The client may send further requests before a reply. Replies have the
   order of the requests, and repeat the sequence number in the header of the request's frame.

The session ends when one of its connections ends. The server then closes its files and destroys the queue pairs. If the
client's NIC refuses access to the memory of an operation (an invalidated key, freed memory), the result is -EREMOTEIO,
and the server closes the data connection after that result. Operations without a result did not cause the error. The
client may send them again in its next session.

A request is ``{"op": NAME, ...}`` with the fields of its class below; optional fields may be missing. A reply is
``{"ok": {...}}`` with the fields of the reply's class, or ``{"error": {"errno": N, "message": TEXT}}``. Paths are
relative to the store, with ``/`` between names. The server follows no symbolic links (ELOOP), and no path leads out of
the store (EXDEV). The names ``.gdrkit`` and ``3fs-virt`` in the root of the store do not exist for clients. Bytes of a
name that are not UTF-8 are sent as surrogates, as :func:`os.fsdecode` makes them.

=============  =====================================================  =====================
operation      class                                                  reply
=============  =====================================================  =====================
hello          :class:`StorageHello`                                  :class:`HelloReply`
attach         :class:`Attach`                                        :class:`Done`
open           :class:`Open`                                          :class:`OpenReply`
adopt          :class:`Adopt`, with a descriptor; unix socket only    :class:`OpenReply`
close          :class:`Close`                                         :class:`Done`
stat           :class:`Stat`                                          :class:`FileStat`
list           :class:`List`                                          :class:`ListReply`
mkdir          :class:`Mkdir`                                         :class:`FileStat`
rmdir          :class:`Rmdir`                                         :class:`Done`
unlink         :class:`Unlink`                                        :class:`Done`
rename         :class:`Rename`                                        :class:`Done`
link           :class:`HardLink`                                      :class:`FileStat`
symlink        :class:`Symlink`                                       :class:`FileStat`
readlink       :class:`Readlink`                                      :class:`ReadlinkReply`
truncate       :class:`Truncate`                                      :class:`FileStat`
sync           :class:`Sync`                                          :class:`Done`
punch_hole     :class:`PunchHole`                                     :class:`Done`
statfs         :class:`Statfs`                                        :class:`StatfsReply`
chmod          :class:`Chmod`                                         :class:`FileStat`
utimens        :class:`Utimens`                                       :class:`FileStat`
chown          :class:`Chown`                                         :class:`FileStat`
user           :class:`SetUser`                                       :class:`Done`
statistics     :class:`ReadStatistics`                                :class:`StatisticsReply`
=============  =====================================================  =====================
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "LANES_MAX",
    "PROTOCOL_VERSION",
    "TOKEN_CHARACTERS_MAX",
    "Adopt",
    "Attach",
    "Chmod",
    "Chown",
    "Close",
    "Done",
    "ErrorReply",
    "FileStat",
    "FolderEntry",
    "HardLink",
    "HelloReply",
    "List",
    "ListReply",
    "Mkdir",
    "Open",
    "OpenReply",
    "PunchHole",
    "ReadStatistics",
    "Readlink",
    "ReadlinkReply",
    "Rename",
    "Rmdir",
    "SessionLimits",
    "SetUser",
    "Stat",
    "Statfs",
    "StatfsReply",
    "StatisticsReply",
    "StorageHello",
    "Symlink",
    "Sync",
    "Truncate",
    "Unlink",
    "Utimens",
]

PROTOCOL_VERSION = 1
# Largest number of queue pairs of a session, which the messages call lanes.
LANES_MAX = 16
TOKEN_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True)
class StorageHello:
    """Begin a session.

    `client`: name of the client program, for the log. `token`: content of ``.gdrkit/token`` (required over TCP).
    `lanes`: the endpoints of 1 to 16 queue pairs, each an :class:`~gdrkit.verbs.Endpoint` as a mapping. `replaces`: the
    secret of a session that the client gave up. The server ends that session before the new one begins, so that no
    request of the old session is executed after a request of the new session.
    """

    version: int
    client: str
    lanes: tuple[dict[str, int | str], ...]
    token: str | None = None
    replaces: str | None = None


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits of a server.

    Attributes
    ----------
    outstanding_max : int
        Largest number of operations of a session that have no result yet. At this number, the server reads no further
        requests from the data connection.
    length_bytes_max : int
        Largest length of one operation, in bytes.
    checksum_given_bytes_max : int
        Largest length of a write with ``CHECKSUM_GIVEN``, in bytes. A longer write fails with -EMSGSIZE.
    handles_max : int
        Largest number of open files of a session.
    reads_max : int
        Largest number of concurrent RDMA READs of the server on one queue pair.
    """

    outstanding_max: int
    length_bytes_max: int
    checksum_given_bytes_max: int
    handles_max: int
    reads_max: int


@dataclass(frozen=True, slots=True)
class HelloReply:
    """The session begins.

    `server`: name and version of the server program. `session`: the secret for :class:`Attach`, 64 hex digits. `lanes`:
    the endpoints of the server's queue pairs. `chunk_bytes`: number of bytes of a file that one checksum covers.
    """

    version: int
    server: str
    session: str
    lanes: tuple[dict[str, int | str], ...]
    limits: SessionLimits
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Attach:
    """Make this connection the data connection of a session. `session`: the secret in the :class:`HelloReply`."""

    session: str


@dataclass(frozen=True, slots=True)
class Open:
    """Open a regular file with flags as in open(2). `mode`: permission bits of a new file."""

    path: str
    read: bool = True
    write: bool = False
    create: bool = False
    truncate: bool = False
    exclusive: bool = False
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Adopt:
    """Open the file of the store to which a descriptor refers.

    The descriptor comes with this frame (SCM_RIGHTS). Its access mode must permit the requested reads
    and writes.
    """

    read: bool = True
    write: bool = False


@dataclass(frozen=True, slots=True)
class FileStat:
    """The attributes of a file, as in stat(2)."""

    inode: int
    mode: int
    size_bytes: int
    links: int
    uid: int
    gid: int
    allocated_bytes: int
    access_time_ns: int
    modification_time_ns: int
    change_time_ns: int


@dataclass(frozen=True, slots=True)
class OpenReply:
    """The file is open. `handle` identifies it in later requests and in operations."""

    handle: int
    stat: FileStat


@dataclass(frozen=True, slots=True)
class Close:
    """Close a handle. Operations that have begun complete normally."""

    handle: int


@dataclass(frozen=True, slots=True)
class Stat:
    """Return the attributes of a path or of an open file. Exactly one of `path` and `handle` must be set.

    A symbolic link is not followed.
    """

    path: str | None = None
    handle: int | None = None


@dataclass(frozen=True, slots=True)
class List:
    """List the names of a folder in the order of their bytes, all or only after `after`. The path "" is the root."""

    path: str
    after: str | None = None


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """One name in a folder. `kind`: the file type bits of the mode (``stat.S_IFMT``)."""

    name: str
    inode: int
    kind: int


@dataclass(frozen=True, slots=True)
class ListReply:
    """Names in a folder. `more`: the folder has further names after the last one of this reply."""

    entries: tuple[FolderEntry, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Mkdir:
    """Create a folder."""

    path: str
    mode: int = 0o755


@dataclass(frozen=True, slots=True)
class Rmdir:
    """Remove an empty folder."""

    path: str


@dataclass(frozen=True, slots=True)
class Unlink:
    """Remove a name of a file or symbolic link."""

    path: str


@dataclass(frozen=True, slots=True)
class Rename:
    """Rename by renameat2(2). `exclusive`: EEXIST if `new_path` exists. `exchange`: swap both names."""

    path: str
    new_path: str
    exclusive: bool = False
    exchange: bool = False


@dataclass(frozen=True, slots=True)
class HardLink:
    """Create a second name (hard link) for a file."""

    path: str
    new_path: str


@dataclass(frozen=True, slots=True)
class Symlink:
    """Create a symbolic link, which the server itself never follows."""

    path: str
    target: str


@dataclass(frozen=True, slots=True)
class Readlink:
    """Read the target of a symbolic link."""

    path: str


@dataclass(frozen=True, slots=True)
class ReadlinkReply:
    """The target of a symbolic link, unchanged."""

    target: str


@dataclass(frozen=True, slots=True)
class Truncate:
    """Set the size of a file. Exactly one of `path` and `handle` (open for writing) must be set."""

    size_bytes: int
    path: str | None = None
    handle: int | None = None


@dataclass(frozen=True, slots=True)
class Sync:
    """Sync a file by fsync(2), or by fdatasync(2) with `data_only`."""

    handle: int
    data_only: bool = False


@dataclass(frozen=True, slots=True)
class PunchHole:
    """Turn these ranges, each [begin, end), into holes. Bytes after the end of the file are ignored."""

    handle: int
    ranges: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Statfs:
    """Read the total and the free space of the file system."""


@dataclass(frozen=True, slots=True)
class StatfsReply:
    """The result of statvfs(3). The three numbers of blocks are in units of `block_bytes`; `files` counts inodes."""

    block_bytes: int
    blocks: int
    blocks_free: int
    blocks_available: int
    files: int
    files_free: int
    name_bytes_max: int


@dataclass(frozen=True, slots=True)
class Chmod:
    """Change permission bits."""

    path: str
    mode: int


@dataclass(frozen=True, slots=True)
class Utimens:
    """Change the times of a file, in nanoseconds since 1970. A time that is None stays as it is."""

    path: str
    access_time_ns: int | None = None
    modification_time_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Chown:
    """Change the owner and the group. None keeps the current one. A session without :class:`SetUser` gets EPERM."""

    path: str
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, slots=True)
class SetUser:
    """Use the rights of this user for all later requests of this session that name a path.

    The kernel of the server checks the rights, and new files belong to the user and to `gid`. New files get the
    permission bits of the request, and the umask of the server has no effect. Requests with a handle need no further
    rights. A server that is not run by root refuses this request (EPERM).
    """

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadStatistics:
    """Read the counters of the server since its start."""


@dataclass(frozen=True, slots=True)
class StatisticsReply:
    """Counters by name. Units are in the names."""

    counters: dict[str, int]


@dataclass(frozen=True, slots=True)
class Done:
    """A reply without further data."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A failure: the errno of the server and a sentence."""

    errno: int
    message: str
