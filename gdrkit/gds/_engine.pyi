"""The copy engine between files and memory of the host or of devices."""



class EngineError(Exception):
    pass

def residency(fd: int, offset: int, length: int) -> tuple[int, int]:
    """
    Return the number of cached pages of a range, and the number of its pages.
    """

def keep_forever(object: object) -> None: ...

def totals() -> tuple[int, int]:
    """
    Return the number of transfers of this process that are over, and the number of bytes that they moved.
    """

def node_of_device(bus_id: str, sysfs: str = '/sys') -> int: ...

class OpenFile:
    """
    A descriptor of the caller, and a second one with O_DIRECT, which this object owns.
    """

    def __init__(self, fd: int) -> None: ...

    def begin_use(self) -> bool:
        """
        Count a use of the descriptor, for which begin_close() waits. Return False if the file is being closed.
        """

    def end_use(self) -> None: ...

    def begin_close(self) -> None:
        """Refuse further uses, and wait until there are none."""

    def end_close(self, is_closed: bool) -> None:
        """
        Close the descriptor with O_DIRECT, or allow uses again if the file was not closed.
        """

    def direct(self) -> bool: ...

    @property
    def direct_refusal(self) -> int: ...

    @property
    def alignment_bytes(self) -> int: ...

    def residency(self, offset: int, length: int) -> tuple[int, int]:
        """
        Return the number of cached pages of a range, and the number of its pages.
        """

class CompletionQueue:
    """
    The tokens of ended jobs, which worker threads add and Python takes in batches.
    """

    def __init__(self, *, has_event: bool) -> None: ...

    def push(self, token: int) -> None: ...

    def take(self) -> list[int]: ...

    def fileno(self) -> int: ...

class Job:
    """The transfer of the ranges of one call."""

    def wait(self, timeout_us: int = -1) -> bool: ...

    def is_over(self) -> bool: ...

    def cancel(self) -> None: ...

    def notify(self, queue: CompletionQueue, token: int) -> None:
        """
        Add the token to the queue when the job is over; at once if it is over already.
        """

    def progress(self) -> dict: ...

    def arrived(self) -> list[int]:
        """
        Return for each extent the number of bytes that arrived from its beginning without a gap.
        """

class Engine:
    """Threads and pinned memory of one NUMA node."""

    def __init__(self, *, node: int, workers_count: int, buffers_count: int, chunk_bytes: int, first_chunk_bytes: int, coalesced_bytes: int, coalesced_count: int, slice_bytes: int, polls_device: bool, direct_readers_count: int, direct_read_bytes: int, direct_writers_count: int, direct_write_bytes: int, buffered_writers_count: int) -> None: ...

    def submit(self, write: bool, access: int, device: int, files: list, extents: object, flags: int, durable: bool, token: int) -> Job:
        """
        Queue a job and return it. At its end, `token` is added to `ended_jobs`.
        """

    def transfer_small(self, write: bool, file: OpenFile, offset: int, address: int, length: int, device: int) -> tuple: ...

    def close(self) -> None: ...

class HostMemory:
    """A contiguous host buffer, which stays exported until release()."""

    def __init__(self, object: object, *, writable: bool) -> None: ...

    @property
    def address(self) -> int: ...

    @property
    def length_bytes(self) -> int: ...

    def release(self) -> None: ...

SMALL_BYTES_MAX: int = 262144

SMALL_HOST_WRITE_BYTES_MAX: int = 4194304

HOST: int = -1

ended_jobs: CompletionQueue = ...
