"""Transfers that coroutines await: their results, their errors, a thousand at once, and cancellation."""

from __future__ import annotations

import asyncio
import errno
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gds.faulty_file import FaultyFile
from support.gds import HOST_AND_DEVICE, allocate_memory
from support.processes import limit_open_files

from gdrkit import gds, pattern
from gdrkit.errors import ApiError, ClosedResource, Reason, UsageError
from gdrkit.gds.event_loop import LoopWaits
from gdrkit.harness.needs import host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from types import FrameType

    from gdrkit.cuda import Device

ON_HOST_AND_DEVICE = pytest.mark.parametrize("memory_kind", HOST_AND_DEVICE, indirect=True)
READ_COUNT = 1000


@ON_HOST_AND_DEVICE
def test_awaited_transfers_move_the_bytes(
    tmp_path: Path, seed: int, memory_kind: str, owner_device: Device | None
) -> None:
    data = pattern.payload(2 * MIB + 3, seed=seed)

    async def write_and_read() -> None:
        async with gds.AsyncFile(tmp_path / "file", "w", direct="never") as file:
            assert (await file.write_from(memory.buffer, durable=True)).bytes == len(data)
            # One range: offset in the file, length, and offset in the buffer.
            assert (await file.writev(memory.buffer, [(len(data), 5, 1)])).range_bytes == (5,)
        async with gds.AsyncFile(tmp_path / "file", direct="never") as file:
            memory.write(bytes(len(data)))
            result = await file.read_into(memory.buffer, length_bytes=len(data))
            assert (result.bytes, result.route) == (len(data), gds.Route.ENGINE)
            assert memory.read_all() == data
            assert (await file.readv(memory.buffer, [(len(data), 5), (0, 2)])).range_bytes == (5, 2)
            assert memory.read_all()[:7] == data[1:6] + data[:2]
        with pytest.raises(ClosedResource):
            await file.read_into(memory.buffer)

    with allocate_memory(memory_kind, len(data), owner_device) as memory:
        memory.write(data)
        asyncio.run(write_and_read())


def test_awaited_transfer_raises_the_error_of_the_transfer(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))

    async def read() -> None:
        async with gds.AsyncFile(tmp_path / "file", direct="never") as file:
            with pytest.raises(gds.TransferFailed) as error_info:
                await file.read_into(bytearray(20), length_bytes=20)
            assert (error_info.value.reason, error_info.value.partial_result.bytes) == (Reason.END_OF_FILE, 10)
            with pytest.raises(UsageError, match="opened for reading only"):
                await file.write_from(b"x")

    asyncio.run(read())


@ON_HOST_AND_DEVICE
@pytest.mark.parametrize("cancels_half", [False, True], ids=["all", "half-cancelled"])
def test_thousand_reads_at_once_leave_nothing_open(
    tmp_path: Path, seed: int, memory_kind: str, owner_device: Device | None, *, cancels_half: bool
) -> None:
    data = pattern.payload(READ_COUNT * 4 * KIB, seed=seed)
    (tmp_path / "file").write_bytes(data)

    async def read() -> list[object]:
        async with gds.AsyncFile(tmp_path / "file", direct="never") as file:
            tasks = [
                asyncio.create_task(
                    file.read_into(
                        memory.buffer, file_offset_bytes=offset, length_bytes=4 * KIB, buffer_offset_bytes=offset
                    )
                )
                for offset in range(0, len(data), 4 * KIB)
            ]
            await asyncio.wait(tasks, timeout=0)  # Each task starts its read.
            for task in tasks[1::2] if cancels_half else ():
                task.cancel()
            return list(await asyncio.gather(*tasks, return_exceptions=True))

    with allocate_memory(memory_kind, len(data), owner_device) as memory:
        results = asyncio.run(read())
        memory_bytes = memory.read_all()
        for index, result in enumerate(results):
            if isinstance(result, gds.TransferResult):
                read_slice = slice(index * 4 * KIB, (index + 1) * 4 * KIB)
                assert (result.bytes, memory_bytes[read_slice]) == (4 * KIB, data[read_slice])
            else:
                assert isinstance(result, asyncio.CancelledError)
                assert index % 2 == 1
    assert len(results) == READ_COUNT
    assert cancels_half == any(isinstance(result, asyncio.CancelledError) for result in results)


def test_awaited_transfers_need_no_thread_of_the_loop(tmp_path: Path, seed: int) -> None:
    data = pattern.payload(100 * KIB, seed=seed)
    (tmp_path / "file").write_bytes(data)
    memory = bytearray(len(data))

    async def read() -> None:
        file = gds.File(tmp_path / "file", direct="never")
        offsets = range(0, len(data), KIB)
        transfers = [
            file.start_read_into(memory, file_offset_bytes=offset, length_bytes=KIB, buffer_offset_bytes=offset)
            for offset in offsets
        ]
        for transfer in transfers:
            assert (await transfer).bytes == KIB
        file.close()
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncio")]

    descriptor_count_before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        asyncio.run(read())
        assert memory == data
    gds.close_engines()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptor_count_before


@needs(host.fuse)
@pytest.mark.timeout(60)
def test_await_without_a_descriptor_left_names_the_errno(tmp_path: Path, seed: int) -> None:
    """In an older version, the caller got the raw error of the native module."""
    (tmp_path / "mount").mkdir()
    memory = bytearray(MIB)

    async def read(faulty_file: FaultyFile) -> None:
        async with gds.AsyncFile(faulty_file.path, access="buffered", direct="never") as file:
            # Blocked reads keep all threads of the engine busy, so the last transfer cannot end before it is awaited.
            transfers = [file.file.start_read_into(memory) for _ in range(200)]
            faulty_file.expect_line("waiting")
            try:
                with limit_open_files(0), pytest.raises(ApiError) as error_info:
                    await transfers[-1]
                assert (error_info.value.operation, error_info.value.errno) == ("eventfd", errno.EMFILE)
                assert transfers[-1].done()
            finally:
                # Otherwise, the close of the file would wait for the blocked reads.
                faulty_file.send("open")

    with FaultyFile(tmp_path / "mount", length_bytes=MIB, seed=seed) as faulty_file:
        faulty_file.send(f"gate 0 {MIB}")
        asyncio.run(read(faulty_file))
    memory.clear()  # This raises BufferError if a transfer still uses the memory.


def test_cancelled_coroutine_ends_after_its_transfer(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(64 * MIB))
    memory = bytearray(64 * MIB)

    async def read() -> None:
        async with gds.AsyncFile(tmp_path / "file", direct="never") as file:
            transfer = file.file.start_read_into(memory)

            async def await_transfer() -> gds.TransferResult:
                return await transfer

            task = asyncio.create_task(await_transfer())
            await asyncio.wait([task], timeout=0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert transfer.done()

    asyncio.run(read())
    memory.clear()  # This raises BufferError if the transfer still uses the memory.


@pytest.mark.parametrize("line_number", range(1, 4))
def test_error_of_a_signal_handler_loses_no_end(tmp_path: Path, line_number: int) -> None:
    """A signal handler raises an exception while the event loop collects the completed jobs.

    A trace function takes the place of the handler. It raises the exception before line `line_number` of the method
    that collects.
    """
    (tmp_path / "data").write_bytes(bytes(4 * KIB))
    lines_until_error = line_number

    def raise_at_line(frame: FrameType, event: str, _argument: object) -> Any:  # noqa: ANN401 - a function or None.
        nonlocal lines_until_error
        if frame.f_code is not LoopWaits._complete_futures.__code__:  # noqa: SLF001 - where a signal may arrive.
            return None
        lines_until_error -= event == "line"
        if lines_until_error == 0:
            raise ValueError
        return raise_at_line

    async def read(transfer: gds.Transfer) -> int:
        return (await transfer).bytes

    async def read_all(file: gds.File) -> int:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)  # Do not log the ValueError.
        transfers = [file.start_read_into(bytearray(4 * KIB)) for _ in range(3)]
        tasks = [asyncio.create_task(read(transfer)) for transfer in transfers]
        _, pending_tasks = await asyncio.wait(tasks, timeout=5)
        return len(pending_tasks)

    with gds.File(tmp_path / "data", direct="never") as file:
        sys.settrace(raise_at_line)
        try:
            pending_count = asyncio.run(read_all(file))
        finally:
            sys.settrace(None)
    assert pending_count == 0
