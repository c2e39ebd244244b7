"""Communicators of NCCL, and memory that is registered with them.

Each rank should be a process of its own. A thread with the communicators of several devices must put every collective
call, and the destruction of the communicators, into NCCL groups, because a call outside of a group never returns.
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
    """Types of elements (``ncclDataType_t``)."""

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
    """Operations of a reduction (``ncclRedOp_t``)."""

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
    def before_release(self, action: Callable[[], None]) -> Callable[[], None]: ...


class DeviceStream(Protocol):
    """A CUDA stream, such as a stream of gdrkit.cuda."""

    @property
    def handle(self) -> int:
        """The driver's handle of the stream."""


def create_unique_id() -> bytes:
    """Return the identity of a new communicator. One rank creates it and sends it to the others.

    NCCL starts a thread in this process, by which the ranks connect to each other.
    """
    return _nccl.unique_id()


class Communicator(Resource):
    """A communicator of this process for one device; a context manager.

    The constructor and :meth:`close` return when all ranks have called them.

    Parameters
    ----------
    device : PrimaryContext
        The device of this rank. Two ranks must not use the same device.
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
            self._communicator = _nccl.create_communicator(rank=rank, ranks_count=ranks_count, identity=unique_id)
        super().__init__("nccl.communicator", name="communicator", on_close=device.on_close)

    @property
    def handle(self) -> int:
        """The ncclComm_t of the communicator; 0 after :meth:`abort`."""
        self._check_open()
        return self._communicator

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
            A stream of the device.
        data_type : DataType
            Type of the elements.
        operation : ReduceOperation
            How elements are reduced.
        length_bytes : int or None
            Size of the reduced data, in bytes. None: the size of the source.

        Raises
        ------
        UsageError
            The length is not a multiple of the size of an element, or the source or the target is smaller.
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
        """Raise the error of an operation that failed after its call, for example because another rank ended.

        Raises
        ------
        ApiError
            An operation failed. :meth:`abort` then releases the communicator without the other ranks.
        """
        with self.device.current():
            status = _nccl.get_async_status(self.handle)
        if status:
            raise _nccl.error_of("ncclCommGetAsyncError", status, {"rank": self.rank})

    def abort(self) -> None:
        """Stop all operations and release the communicator, without the other ranks."""
        if self.closed:
            return
        with self.device.current():
            _nccl.call("ncclCommAbort", self.handle)
        # NCCL has released the registrations together with the communicator.
        self._communicator = 0
        self.close()

    def _release(self) -> None:
        self._registrations.run()
        if self._communicator:
            with self.device.current():
                _nccl.call("ncclCommDestroy", self._communicator, rank=self.rank)

    def add_registration(self, close: Callable[[], None]) -> Callable[[], None]:
        """Register `close` to be called before the communicator is destroyed. Return a function that cancels this."""
        return self._registrations.push(close)


class NcclRegistration(Resource):
    """Memory that is registered with a communicator (ncclCommRegister); a context manager.

    NCCL decides for each operation whether it uses the registration. :class:`gdrkit.nccl.NcclLog` shows the decision.

    The memory must be deregistered before it is freed. Closing memory of gdrkit does that.

    Parameters
    ----------
    communicator : Communicator
        The communicator. It deregisters the memory before it is destroyed.
    memory : ReducibleMemory
        The memory. NCCL needs memory of cuMemCreate, such as :class:`~gdrkit.cuda.VmmMemory` and
        :class:`~gdrkit.nccl.NcclMemory`, to use it between the GPUs of a host.

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
        # An aborted communicator has no handle, because NCCL has released it with all registrations.
        if communicator_handle := self.communicator.handle:
            with self.communicator.device.current():
                _nccl.call("ncclCommDeregister", communicator_handle, self.handle)
        self._remove_release_callback()
