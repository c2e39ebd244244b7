"""One side of a transfer of 1 MiB by a Python package: ``python_peer.py PACKAGE target|initiator FOLDER``.

PACKAGE is nixl, nixl-gpu (NIXL with the memory of a GPU) or mooncake. The target registers a buffer with a pattern and
writes the address of the buffer to FOLDER. The initiator reads the buffer, compares the bytes with the pattern, and
writes the inverted bytes back. It then creates the file FOLDER/written, and the target checks the inverted bytes. This
program runs in an environment that has the packages and not gdrkit.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

LENGTH_BYTES = 1 << 20
_PAUSE_S = 0.02
_TIMEOUT_S = 30.0
# Values of cudaMemcpyKind.
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2


class HostBuffer:
    """A buffer in host memory."""

    nixl_type = "DRAM"  # The type of the memory for NIXL.

    def __init__(self) -> None:
        self._array = np.zeros(LENGTH_BYTES, dtype=np.uint8)
        self.address = self._array.ctypes.data

    def write(self, content: Any) -> None:  # noqa: ANN401 - numpy does not name the type of its arrays.
        """Replace the content."""
        self._array[:] = content

    def read(self) -> Any:  # noqa: ANN401 - as write().
        """Return a copy of the content."""
        return self._array.copy()


class GpuBuffer:
    """A buffer in the memory of GPU 0, which the CUDA runtime allocates and copies."""

    nixl_type = "VRAM"

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL("libcudart.so.12")
        pointer = ctypes.c_void_p()
        self._exit_on_error(self._runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(LENGTH_BYTES)))
        self.address = pointer.value or 0

    def write(self, content: Any) -> None:  # noqa: ANN401 - as HostBuffer.write().
        """Replace the content."""
        self._copy(self.address, content.ctypes.data, _HOST_TO_DEVICE)

    def read(self) -> Any:  # noqa: ANN401 - as HostBuffer.write().
        """Return a copy of the content."""
        content = np.empty(LENGTH_BYTES, dtype=np.uint8)
        self._copy(content.ctypes.data, self.address, _DEVICE_TO_HOST)
        return content

    def _copy(self, destination_address: int, source_address: int, copy_kind: int) -> None:
        length_bytes = ctypes.c_size_t(LENGTH_BYTES)
        self._exit_on_error(
            self._runtime.cudaMemcpy(
                ctypes.c_void_p(destination_address), ctypes.c_void_p(source_address), length_bytes, copy_kind
            )
        )

    def _exit_on_error(self, error_code: int) -> None:
        if error_code:
            sys.exit(f"the CUDA runtime failed with error {error_code}")


class Nixl:
    """NIXL, with its backend UCX."""

    def __init__(self, role: str, buffer: HostBuffer | GpuBuffer) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
        # A region is (address, length, device, metadata). A transfer descriptor has no metadata.
        region = (buffer.address, LENGTH_BYTES, 0, "")
        self._registration = self._agent.register_memory([region], buffer.nixl_type)
        self._descriptors = self._agent.get_xfer_descs([region[:3]], buffer.nixl_type)
        self._remote_agent: Any = None
        self._remote_descriptors: Any = None

    def publish(self, folder: Path) -> None:
        """Write the data with which the initiator connects."""
        _write_atomically(folder / "descriptors", self._agent.get_serialized_descs(self._descriptors))
        _write_atomically(folder / "metadata", self._agent.get_agent_metadata())

    def connect(self, folder: Path) -> None:
        """Read the data that the target has published."""
        self._remote_agent = self._agent.add_remote_agent(_wait_and_read(folder / "metadata"))
        self._remote_descriptors = self._agent.deserialize_descs(_wait_and_read(folder / "descriptors"))

    def transfer(self, operation: str) -> None:
        """Move the whole buffer; `operation` is READ or WRITE."""
        agent = self._agent
        handle = agent.initialize_xfer(operation, self._descriptors, self._remote_descriptors, self._remote_agent)
        state = agent.transfer(handle)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while state != "DONE":
            if state == "ERR" or time.monotonic() > deadline_s:
                sys.exit(f"{operation} ended in state {state}")
            time.sleep(_PAUSE_S / 10)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Deregister the buffer."""
        self._agent.deregister_memory(self._registration)


class Mooncake:
    """The transfer engine of Mooncake, with its protocol rdma."""

    def __init__(self, role: str, buffer: HostBuffer | GpuBuffer) -> None:  # noqa: ARG002 - as Nixl.
        from mooncake.engine import TransferEngine

        self._engine = TransferEngine()
        self._address = buffer.address
        # Mooncake names the memory of a process a segment. The target's segment has the name HOST:PORT.
        self._remote_segment, self._remote_address = "", 0
        # With P2PHANDSHAKE the engines exchange their metadata over TCP and need no metadata server.
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") != 0:
            sys.exit("TransferEngine.initialize failed")
        if self._engine.register_memory(self._address, LENGTH_BYTES) != 0:
            sys.exit("TransferEngine.register_memory failed")

    def publish(self, folder: Path) -> None:
        """Write the data with which the initiator connects."""
        _write_atomically(folder / "segment", f"127.0.0.1:{self._engine.get_rpc_port()} {self._address}".encode())

    def connect(self, folder: Path) -> None:
        """Read the data that the target has published."""
        self._remote_segment, address = _wait_and_read(folder / "segment").decode().split()
        self._remote_address = int(address)

    def transfer(self, operation: str) -> None:
        """Move the whole buffer; `operation` is READ or WRITE."""
        engine = self._engine
        transfer_function = engine.transfer_sync_read if operation == "READ" else engine.transfer_sync_write
        if transfer_function(self._remote_segment, self._address, self._remote_address, LENGTH_BYTES) != 0:
            sys.exit(f"{operation} failed")

    def close(self) -> None:
        """Deregister the buffer."""
        self._engine.unregister_memory(self._address)


def _make_pattern() -> Any:  # noqa: ANN401 - as HostBuffer.write().
    """Return an array of LENGTH_BYTES bytes: 0 to 255, again and again."""
    return np.arange(LENGTH_BYTES, dtype=np.uint64).astype(np.uint8)


def _wait_and_read(path: Path) -> bytes:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            sys.exit(f"{path.name} was not written within {_TIMEOUT_S:g} s")
        time.sleep(_PAUSE_S)
    return path.read_bytes()


def _write_atomically(path: Path, content: bytes) -> None:
    """Write the file so that a reader never sees an incomplete file."""
    temporary_file = path.with_suffix(".part")
    temporary_file.write_bytes(content)
    temporary_file.rename(path)


def main() -> None:
    """Run the side of the transfer that the command line names."""
    package, role, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    buffer = GpuBuffer() if package == "nixl-gpu" else HostBuffer()
    buffer.write(_make_pattern() if role == "target" else 0 * _make_pattern())
    endpoint = Mooncake(role, buffer) if package == "mooncake" else Nixl(role, buffer)
    if role == "target":
        endpoint.publish(folder)
        _wait_and_read(folder / "written")
        if not np.array_equal(buffer.read(), 255 - _make_pattern()):
            sys.exit("the written bytes are wrong")
    else:
        endpoint.connect(folder)
        endpoint.transfer("READ")
        if not np.array_equal(buffer.read(), _make_pattern()):
            sys.exit("the read bytes are wrong")
        buffer.write(255 - _make_pattern())
        endpoint.transfer("WRITE")
        _write_atomically(folder / "written", b"1")
    endpoint.close()
    print(f"{role}: data verified")  # noqa: T201 - the output of a program.


if __name__ == "__main__":
    main()
