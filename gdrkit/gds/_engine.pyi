"""The copy engine between files and memory of the host or of devices."""

from collections.abc import Callable


class EngineError(Exception):
    pass

class FileClosed(Exception):
    pass

in_progress: dict = {}

ended: dict = {}

def collect_ended() -> bool:
    """
    Add the transfers of `in_progress` whose job is over to `ended`. Return whether `ended` is not empty.
    """

def start(transfer: object, job: object, function: Callable, argument: object) -> None:
    """
    Store the job in the transfer and the transfer in `in_progress`, and call the function, which starts the job.
    """

def residency(fd: int, offset: int, length: int) -> tuple[int, int]:
    """
    Return the number of cached pages of a range, and the number of its pages.
    """

def keep_forever(object: object) -> None: ...

def ignore_leaks() -> None:
    """Do not report the objects that still exist when the interpreter ends."""

def totals() -> tuple[int, int]:
    """
    Return the number of transfers of this process that are over, and the number of bytes that they moved.
    """

def node_of_device(bus_id: str, sysfs: str = '/sys') -> int: ...

class FileUse:
    """A use of a file, which ends with its `with` block or with this object."""

    def __enter__(self) -> OpenFile: ...

    def __exit__(self, error_class: object | None, error: object | None, traceback: object | None) -> None: ...

class OpenFile:
    """An open file, with a second descriptor for O_DIRECT."""

    def __init__(self, fd: int) -> None: ...

    @staticmethod
    def open(path: bytes, flags: int, mode: int, folder: int = -100) -> OpenFile: ...

    def begin_use(self) -> FileUse:
        """
        Return a use of the file. close() waits for its end. Raise FileClosed if the file is closed.
        """

    def close(self, end_transfers: object | None = None, waits: bool = True) -> None:
        """
        Refuse further uses, wait until there are no uses, call `end_transfers`, and close the descriptors. If `waits` is not set, do not wait; the last use closes the descriptors. Raise EngineError (EDEADLK) if the calling thread uses the file.
        """

    @property
    def closed(self) -> bool: ...

    def fileno(self) -> int:
        """
        Return the descriptor, which this object owns, or -1 if the file is closed.
        """

    def replace_after_fork(self) -> OpenFile:
        """Return a file with the same descriptor, for a forked child."""

    def size_bytes(self) -> int:
        """Return the size of the file. Raise FileClosed if the file is closed."""

    def direct(self) -> bool:
        """
        Return whether the file system supports O_DIRECT for the file; see direct_open_errno.
        """

    @property
    def direct_open_errno(self) -> int: ...

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

    def take(self) -> list[int]:
        """Remove the tokens from the queue and return them."""

    def fileno(self) -> int:
        """
        Return an eventfd that is readable while the queue has tokens, or -1 without `has_event`.
        """

class Completion:
    """A flag that is set when a job that Python code runs itself is over."""

    def __init__(self) -> None: ...

    def wait(self, timeout_us: int = -1) -> bool: ...

    def is_over(self) -> bool: ...

    def notify(self, queue: CompletionQueue, token: int) -> None:
        """
        Add the token to the queue when the job is over, or at once if the job is already over.
        """

    def end(self) -> None: ...

class Job:
    """The transfer of the ranges of one call."""

    def wait(self, timeout_us: int = -1) -> bool: ...

    def is_over(self) -> bool: ...

    def cancel(self) -> None: ...

    def notify(self, queue: CompletionQueue, token: int) -> None:
        """
        Add the token to the queue when the job is over, or at once if the job is already over.
        """

    def progress(self) -> dict: ...

    def arrived(self) -> list[int]:
        """
        Return for each extent the number of bytes that arrived from its beginning without a gap.
        """

class Engine:
    """A copy engine: threads and pinned memory on one NUMA node."""

    def __init__(self, *, node: int, workers_count: int, buffers_count: int, chunk_bytes: int, first_chunk_bytes: int, coalesced_bytes: int, coalesced_count: int, slice_bytes: int, polls_device: bool, direct_readers_count: int, direct_read_bytes: int, direct_writers_count: int, direct_write_bytes: int, buffered_writers_count: int) -> None: ...

    def submit(self, write: bool, access: int, device: int, files: list, extents: object, flags: int, durable: bool, transfer: object) -> Job:
        """
        Queue a job and return it. Store it in the attribute `job` of the transfer, and the transfer in `in_progress`.
        """

    def transfer_small(self, write: bool, file: OpenFile, offset: int, address: int, length: int, device: int) -> tuple: ...

    def close(self) -> bool:
        """
        Refuse further jobs, wait for the queued jobs, end the threads and free the memory. In a child process that a signal handler has forked, do nothing and return False.
        """

class HostMemory:
    """
    The memory of a contiguous host buffer. The buffer cannot be freed or resized until release().
    """

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
