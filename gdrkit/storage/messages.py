"""What goes through the control connection of the storage service: one JSON object a frame, parsed strictly.

Level 4, pure. The session, from its beginning:

1. The client opens a *control connection* (TCP, or a unix socket of mode 0600 whose user is checked) and sends
   :class:`Hello` with the endpoint of one queue pair for each *lane*. :class:`HelloReply` has the session's secret, the
   server's endpoints in the same order, and the limits. The server's queue pairs are ready then; the client connects
   its own to them, with ``reads_max`` of the limits.
2. It opens a *data connection* to the same place and sends :class:`Attach` with the secret. After that reply, this
   connection carries io requests and io replies alone (:mod:`gdrkit.storage.wire`).
3. Everything else is a request on the control connection, one at a time or several: replies come in order and repeat
   the sequence.

The session ends with either connection: handles are closed and queue pairs destroyed. An operation that RDMA could not
do (a key that was taken back, a client that is gone) is -EREMOTEIO, and so are all after it: the server closes the data
connection behind these results.

A request is ``{"op": NAME, ...}`` with the fields of its class below; optional fields may be missing. A reply is
``{"ok": {...}}`` with the fields of the reply's class, or ``{"error": {"errno": N, "message": TEXT}}``. Paths are
relative to the store, with ``/`` between names; no symbolic link is followed (ELOOP), none leads out (EXDEV), and the
names ``.gdrkit`` and ``3fs-virt`` in the root of the store do not exist for clients. Bytes of a name that are not UTF-8
travel as surrogates, as :func:`os.fsdecode` makes them.

=============  =====================================================  =====================
operation      class                                                  reply
=============  =====================================================  =====================
hello          :class:`Hello`                                         :class:`HelloReply`
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
link           :class:`Link`                                          :class:`FileStat`
symlink        :class:`Symlink`                                       :class:`FileStat`
readlink       :class:`Readlink`                                      :class:`ReadlinkReply`
truncate       :class:`Truncate`                                      :class:`FileStat`
sync           :class:`Sync`                                          :class:`Done`
punch_hole     :class:`PunchHole`                                     :class:`Done`
statfs         :class:`Statfs`                                        :class:`StatfsReply`
chmod          :class:`Chmod`                                         :class:`FileStat`
utimens        :class:`Utimens`                                       :class:`FileStat`
statistics     :class:`Statistics`                                    :class:`StatisticsReply`
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
    "Close",
    "Done",
    "Entry",
    "ErrorReply",
    "FileStat",
    "Hello",
    "HelloReply",
    "Limits",
    "Link",
    "List",
    "ListReply",
    "Mkdir",
    "Open",
    "OpenReply",
    "PunchHole",
    "Readlink",
    "ReadlinkReply",
    "Rename",
    "Rmdir",
    "Stat",
    "Statfs",
    "StatfsReply",
    "Statistics",
    "StatisticsReply",
    "Symlink",
    "Sync",
    "Truncate",
    "Unlink",
    "Utimens",
]

PROTOCOL_VERSION = 1
LANES_MAX = 16
TOKEN_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True)
class Hello:
    """Begin a session. `token`: content of ``.gdrkit/token`` (needed over TCP); `lanes`: an
    :class:`~gdrkit.verbs.Endpoint` as a mapping for each, 1 to 16. `replaces`: the secret of a session that the client
    gave up. It has ended before this one begins, so that nothing that it was told happens after what this one is told.
    """

    version: int
    client: str
    lanes: tuple[dict[str, int | str], ...]
    token: str | None = None
    replaces: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server takes.

    Attributes
    ----------
    outstanding_max : int
        Operations of a session that have no result yet; the server reads no further while there are more.
    length_bytes_max : int
        Of one operation.
    checksum_given_bytes_max : int
        Of a write with ``CHECKSUM_GIVEN``; a longer one is -EMSGSIZE.
    handles_max : int
        Open files of a session.
    reads_max : int
        RDMA READs that the server has under way on a lane at once.
    """

    outstanding_max: int
    length_bytes_max: int
    checksum_given_bytes_max: int
    handles_max: int
    reads_max: int


@dataclass(frozen=True, slots=True)
class HelloReply:
    """`session`: the secret for :class:`Attach`, 64 hexadecimal digits; `lanes`: the server's endpoints."""

    version: int
    server: str
    session: str
    lanes: tuple[dict[str, int | str], ...]
    limits: Limits
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Attach:
    """Make this connection the data connection of a session."""

    session: str


@dataclass(frozen=True, slots=True)
class Open:
    """Open a regular file; flags as of open(2). `mode`: permission bits of one that is created."""

    path: str
    read: bool = True
    write: bool = False
    create: bool = False
    truncate: bool = False
    exclusive: bool = False
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Adopt:
    """Open the file of the store that a descriptor names, which came with this frame (SCM_RIGHTS); reading and writing
    must be what the descriptor itself may.
    """

    read: bool = True
    write: bool = False


@dataclass(frozen=True, slots=True)
class FileStat:
    """What stat(2) says."""

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
    """`handle` goes into operations."""

    handle: int
    stat: FileStat


@dataclass(frozen=True, slots=True)
class Close:
    """Close a handle; operations that have begun end as they would have."""

    handle: int


@dataclass(frozen=True, slots=True)
class Stat:
    """Of a path (of a symbolic link itself), or of an open file: exactly one is given."""

    path: str | None = None
    handle: int | None = None


@dataclass(frozen=True, slots=True)
class List:
    """The names of a folder in the order of their bytes, those behind `after`; "" is the root of the store."""

    path: str
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """`kind`: the format bits of its mode (``stat.S_IFMT``)."""

    name: str
    inode: int
    kind: int


@dataclass(frozen=True, slots=True)
class ListReply:
    """`more`: ask again, after the last of these."""

    entries: tuple[Entry, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Mkdir:
    """Make a folder."""

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
    """renameat2(2); `exclusive`: EEXIST if `new_path` exists; `exchange`: swap both."""

    path: str
    new_path: str
    exclusive: bool = False
    exchange: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A second name for a file."""

    path: str
    new_path: str


@dataclass(frozen=True, slots=True)
class Symlink:
    """Make a symbolic link, which the server itself never follows."""

    path: str
    target: str


@dataclass(frozen=True, slots=True)
class Readlink:
    """Ask for the target of a symbolic link."""

    path: str


@dataclass(frozen=True, slots=True)
class ReadlinkReply:
    """The target, as it was given."""

    target: str


@dataclass(frozen=True, slots=True)
class Truncate:
    """Set the size of a file, by path or by a handle that may write."""

    size_bytes: int
    path: str | None = None
    handle: int | None = None


@dataclass(frozen=True, slots=True)
class Sync:
    """fsync(2), or fdatasync(2) when only data matter."""

    handle: int
    data_only: bool = False


@dataclass(frozen=True, slots=True)
class PunchHole:
    """Make these ranges, each [begin, end), holes; what lies behind the end of the file is left out."""

    handle: int
    ranges: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Statfs:
    """Ask for the room of the file system."""


@dataclass(frozen=True, slots=True)
class StatfsReply:
    """What statvfs(3) says, in blocks of `block_bytes`."""

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
    """Change times, in ns since 1970; None leaves one as it is."""

    path: str
    access_time_ns: int | None = None
    modification_time_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """Ask what the server counted since it began."""


@dataclass(frozen=True, slots=True)
class StatisticsReply:
    """Numbers by name; units are in the names."""

    counters: dict[str, int]


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing more to say."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Why not: an errno of the server and a sentence."""

    errno: int
    message: str
