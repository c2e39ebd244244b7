"""Communicators of NCCL, and memory that is registered with them.

A communicator connects ranks, each with one GPU. Each rank should be a process of its own. A thread that has the
communicators of several ranks must put every collective call, and the destruction of the communicators, into NCCL
groups (ncclGroupStart), because a call outside of a group waits for the other ranks and never returns.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gdrkit.errors import Api, Reason, Unsupported, UsageError
from gdrkit.handles import ReleaseStack, Resource
from gdrkit.nccl import _nccl

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.cuda.context import PrimaryContext

__all__ = [
    "Communicator",
    "DataType",
    "DeviceStream",
    "NcclRegistration",
    "ReduceOperation",
    "ReducibleMemory",
    "create_unique_id",
]


class DataType(enum.IntEnum):
    """Types of the elements that a reduction combines (``ncclDataType_t``)."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9

    @property
    def length_bytes(self) -> int:
        """Size of an element, in bytes."""
        return _ELEMENT_BYTES[self]


_ELEMENT_BYTES = dict(zip(DataType, (1, 1, 4, 4, 8, 8, 2, 4, 8, 2), strict=True))


class ReduceOperation(enum.IntEnum):
    """Operations by which a reduction combines the elements of the ranks (``ncclRedOp_t``)."""

    SUM = 0
    PRODUCT = 1
    MAXIMUM = 2
    MINIMUM = 3
    AVERAGE = 4


class ReducibleMemory(Protocol):
    """Memory that NCCL can use: memory of a device, or a part of it, such as a buffer of a pool."""

    @property
    def address(self) -> int:
        """Device address of the first byte."""

    @property
    def length_bytes(self) -> int:
        """Size in bytes."""


@runtime_checkable
class _NotifyingMemory(Protocol):
    """Memory of gdrkit: :meth:`before_release` registers an action that is called before the memory is freed."""

    def before_release(self, action: Callable[[], None]) -> Callable[[], None]: ...


class DeviceStream(Protocol):
    """A CUDA stream, such as a stream of gdrkit.cuda."""

    @property
    def handle(self) -> int:
        """The driver's handle of the stream."""


def create_unique_id() -> bytes:
    """Return the identity of a new communicator. One rank calls this function and sends the result to the others.

    NCCL starts a thread in the calling process. The ranks find each other through this thread.
    """
    return _nccl.get_unique_id()


class Communicator(Resource):
    """The communicator of one rank, on one device of this process; a context manager.

    The constructor waits until all ranks have called it, and so does :meth:`close`.

    Parameters
    ----------
    device : PrimaryContext
        The GPU of this rank. Two ranks must not use the same GPU.
    rank : int
        Number of this rank, 0 to ``ranks_count - 1``.
    ranks_count : int
        Number of ranks.
    unique_id : bytes
        The result of :func:`create_unique_id` of one rank.

    Raises
    ------
    ApiError
        NCCL failed. Its ``detail`` is the message of NCCL.
    UsageError
        An argument is invalid.
    SetupMissing
        NCCL is missing.
    """

    def __init__(self, device: PrimaryContext, *, rank: int, ranks_count: int, unique_id: bytes) -> None:
        if not 0 <= rank < ranks_count:
            message = f"rank must be 0 to {ranks_count - 1}, not {rank}"
            raise UsageError(message)
        if len(unique_id) != _nccl.UNIQUE_ID_BYTES:
            message = f"unique_id must have {_nccl.UNIQUE_ID_BYTES} bytes, not {len(unique_id)}"
            raise UsageError(message)
        self.device = device
        self.rank = rank
        self.ranks_count = ranks_count
        self._registrations = ReleaseStack()
        with device.current():
            self._communicator_handle = _nccl.create_communicator(
                rank=rank, ranks_count=ranks_count, identity=unique_id
            )
        super().__init__("nccl.communicator", name="communicator", on_close=device.on_close)

    @property
    def handle(self) -> int:
        """The ncclComm_t of the communicator; 0 after :meth:`abort`."""
        self._check_open()
        return self._communicator_handle

    def register(self, memory: ReducibleMemory) -> NcclRegistration:
        """Register memory, so that NCCL need not copy through its own buffers. See :class:`NcclRegistration`."""
        return NcclRegistration(self, memory)

    def all_reduce(
        self,
        source: ReducibleMemory,
        target: ReducibleMemory,
        *,
        stream: DeviceStream,
        data_type: DataType = DataType.FLOAT32,
        operation: ReduceOperation = ReduceOperation.SUM,
        length_bytes: int | None = None,
    ) -> None:
        """Queue an all-reduce on a stream: the target becomes the reduction of the sources of all ranks.

        Parameters
        ----------
        source, target : ReducibleMemory
            Memory of this rank. They may be the same.
        stream : DeviceStream
            A stream of the communicator's device.
        data_type : DataType
            Type of the elements.
        operation : ReduceOperation
            How elements are reduced.
        length_bytes : int or None
            Size of the reduced data, in bytes. None: the size of the source.

        Raises
        ------
        UsageError
            The length is not a multiple of the size of an element, or is above the size of the source or the target.
        ApiError
            NCCL failed.
        """
        length_bytes = source.length_bytes if length_bytes is None else length_bytes
        if length_bytes < 0 or length_bytes % data_type.length_bytes:
            message = f"length_bytes must be a multiple of {data_type.length_bytes}, not {length_bytes}"
            raise UsageError(message)
        if length_bytes > min(source.length_bytes, target.length_bytes):
            message = f"{length_bytes} bytes do not fit into memory of {source.length_bytes} and {target.length_bytes}"
            raise UsageError(message)
        with self.device.current():
            _nccl.call(
                "ncclAllReduce",
                source.address,
                target.address,
                length_bytes // data_type.length_bytes,
                data_type,
                operation,
                self.handle,
                stream.handle,
                count=length_bytes // data_type.length_bytes,
            )

    def check(self) -> None:
        """Raise the error of an operation that failed after its call had returned, e.g. because another rank ended.

        Raises
        ------
        ApiError
            An operation failed. Call :meth:`abort`, because :meth:`close` would wait for the other ranks.
        """
        with self.device.current():
            status = _nccl.get_async_status(self.handle)
        if status:
            raise _nccl.make_error("ncclCommGetAsyncError", status, {"rank": self.rank})

    def abort(self) -> None:
        """Stop all operations and release the communicator without waiting for the other ranks."""
        if self.closed:
            return
        with self.device.current():
            _nccl.call("ncclCommAbort", self.handle)
        # The handle 0 tells _release() and the registrations that NCCL has already released all of them.
        self._communicator_handle = 0
        self.close()

    def _release(self) -> None:
        self._registrations.run()
        if self._communicator_handle:
            with self.device.current():
                _nccl.call("ncclCommDestroy", self._communicator_handle, rank=self.rank)

    def add_registration(self, close_registration: Callable[[], None]) -> Callable[[], None]:
        """Ensure that `close_registration` is called before the communicator is destroyed.

        Return a function that undoes this.
        """
        return self._registrations.push(close_registration)


class NcclRegistration(Resource):
    """Memory that is registered with a communicator (ncclCommRegister); a context manager.

    NCCL decides for each operation whether it uses the registration, and reports this only in its log, which
    :class:`gdrkit.nccl.NcclLog` reads.

    The memory must be deregistered before it is freed. When memory of gdrkit is closed, it closes its registrations.

    Parameters
    ----------
    communicator : Communicator
        The communicator. Closing it closes the registration first.
    memory : ReducibleMemory
        The memory. Between the GPUs of a host, NCCL uses only registrations of memory that cuMemCreate allocated, such
        as :class:`~gdrkit.cuda.VmmMemory` and :class:`~gdrkit.nccl.NcclMemory`.

    Raises
    ------
    Unsupported
        NCCL accepted the call and registered nothing, for example because NCCL_LOCAL_REGISTER is 0.
    ApiError
        NCCL failed.
    """

    def __init__(self, communicator: Communicator, memory: ReducibleMemory) -> None:
        self.communicator = communicator
        self.address = memory.address
        self.length_bytes = memory.length_bytes
        with communicator.device.current():
            self.handle = _nccl.register(communicator.handle, self.address, self.length_bytes)
        if not self.handle:
            raise Unsupported(
                api=Api.NCCL,
                operation="ncclCommRegister",
                status=0,
                status_name="no handle",
                arguments={"buff": self.address, "size": self.length_bytes},
                reason=Reason.NOT_SUPPORTED,
                what_to_do="do not set NCCL_LOCAL_REGISTER=0 or NCCL_P2P_USE_CUDA_MEMCPY=1",
                detail="NCCL registered nothing",
            )
        super().__init__("nccl.registration", name="NCCL registration", on_close=communicator.add_registration)
        self._remove_release_callback: Callable[[], None] = lambda: None
        if isinstance(memory, _NotifyingMemory):
            self._remove_release_callback = memory.before_release(self.close)

    def _release(self) -> None:
        # After abort(), the handle is 0: NCCL has released the communicator with all registrations.
        if communicator_handle := self.communicator.handle:
            with self.communicator.device.current():
                _nccl.call("ncclCommDeregister", communicator_handle, self.handle)
        self._remove_release_callback()
