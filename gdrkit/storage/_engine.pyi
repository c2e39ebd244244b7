"""
The native part of the storage service: RDMA transfers, files and their checksums.
"""

from collections.abc import Sequence


CHECKSUM_GIVEN_BYTES_MAX: int = 262144

def crc32c(data: object, initial: int = 0) -> int: ...

def crc32c_portable(data: object, initial: int = 0) -> int: ...

def crc32c_combine(first: int, second: int, second_bytes: int) -> int: ...

def open_beneath(folder: int, path: bytes, flags: int, mode: int = 0, by_component: bool = False) -> int: ...

def rename(from_folder: int, name: bytes, to_folder: int, new_name: bytes, *, exclusive: bool, exchange: bool) -> None: ...

class Store:
    """
    The files of a store and their checksums (sums). `sums_folder_fd` is a descriptor of the folder with the sums files. `generation_fd` is a descriptor of the memory in which the server counts new sums files, or -1 if no other process reads the sums. The caller keeps these descriptors open and closes them.
    """

    def __init__(self, sums_folder_fd: int, chunk_bytes: int, *, generation_fd: int = -1) -> None: ...

    def adopt(self, fd: int, *, read: bool, write: bool) -> OpenFile:
        """
        Return an OpenFile that owns the descriptor. If this function raises, it closes the descriptor.
        """

    def remove_sums(self, inode: int) -> None: ...

    def counters(self) -> dict[str, int]: ...

class OpenFile:
    """An open file. It is closed with its last reference."""

    @property
    def fd(self) -> int: ...

    @property
    def may_read(self) -> bool: ...

    @property
    def may_write(self) -> bool: ...

    def truncate(self, size_bytes: int) -> None: ...

    def punch(self, begin: int, end: int) -> None: ...

    def set_times(self, access_time_ns: int | None, modification_time_ns: int | None) -> None: ...

class Fabric:
    """
    The open RDMA devices of a server. An empty list of names opens every device with an active port.
    """

    def __init__(self, names: Sequence[str]) -> None: ...

    @property
    def names(self) -> list[str]: ...

class Session:
    """
    The queue pairs, the open files and the thread of one client. `outstanding_max` is the largest number of operations without a result, and `length_bytes_max` the largest length of one operation.
    """

    def __init__(self, store: Store, fabric: Fabric, peer_endpoints: Sequence[dict], *, outstanding_max: int, length_bytes_max: int) -> None: ...

    @property
    def endpoints(self) -> list: ...

    @property
    def reads_max(self) -> int: ...

    @property
    def ended_fd(self) -> int: ...

    def add_file(self, handle: int, file: OpenFile) -> None: ...

    def remove_file(self, handle: int) -> bool: ...

    def start(self, data_fd: int) -> None:
        """
        Start the thread that serves the data connection. The session owns the descriptor, even if the call raises.
        """

    def close(self) -> None: ...
