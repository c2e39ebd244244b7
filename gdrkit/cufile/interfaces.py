"""The interfaces of the memory and of the CUDA streams that a caller provides.

They are protocols, because this package does not import gdrkit.cuda.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["CudaStream", "Memory", "OwnedMemory"]


class Memory(Protocol):
    """The interface of memory that cuFile can use: device or host memory at an address."""

    @property
    def address(self) -> int:
        """Address of the first byte."""

    @property
    def length_bytes(self) -> int:
        """Size in bytes."""

    @property
    def closed(self) -> bool:
        """Whether the memory was freed."""

    def current(self) -> AbstractContextManager[object]:
        """Make the CUDA context of device memory current in this thread during a block. Host memory needs no context.

        cuFile interprets addresses in the current context of the calling thread. Without a current context, cuFile
        refuses to register memory (CU_FILE_CUDA_DRIVER_ERROR, 5011), refuses transfers on streams (ENOMEM), and leaves
        deregistered memory pinned (observed with 1.15 and 1.20).
        """


@runtime_checkable
class OwnedMemory(Memory, Protocol):
    """Memory that can run actions before it is freed. It is sure to run them only if `owned` is true."""

    @property
    def owned(self) -> bool:
        """Whether closing this object frees the memory. If not, other code may free it without informing gdrkit."""

    def before_release(self, action: Callable[[], None]) -> Callable[[], None]:
        """Register `action` to run before the memory is freed, and return a function that removes it."""


class CudaStream(Protocol):
    """The interface of a CUDA stream. The streams of gdrkit.cuda implement it."""

    @property
    def handle(self) -> int:
        """The CUDA driver's handle of the stream (CUstream)."""

    @property
    def closed(self) -> bool:
        """Whether the stream was destroyed. It must not be destroyed before all of its work is done."""

    def query(self) -> bool:
        """Return whether all work of the stream is done."""

    def current(self) -> AbstractContextManager[object]:
        """Make the CUDA context of the stream current in this thread during a block."""
