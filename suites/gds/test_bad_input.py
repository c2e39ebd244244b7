"""Invalid input to gdrkit.gds raises one typed error, and the files, memory and engines stay usable.

The error has the errno if the kernel returned one.
"""

from __future__ import annotations

import errno
import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from gds.faulty_file import FaultyFile
from support.faults import inject_faults
from support.gds import MEMORY_KINDS, CudaArrayBuffer, DlpackBuffer, allocate_memory

from gdrkit import gds, handles, pattern
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, UsageError
from gdrkit.harness.needs import cuda, host, needs, software
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.cuda import Device

# allocate_memory() fills memory with this byte.
FILL_BYTE = 0xA5
EVERY_MEMORY_KIND = pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
FILE_BYTES = 3 * MIB + 5


@pytest.fixture
def file(tmp_path: Path, seed: int) -> Iterator[gds.File]:
    """Yield an open file with the pattern of the seed."""
    (tmp_path / "file").write_bytes(pattern.payload(FILE_BYTES, seed=seed))
    with gds.File(tmp_path / "file", "r+", direct="never") as opened_file:
        yield opened_file


@pytest.mark.parametrize(
    ("create_path", "mode", "expected_errno", "reason"),
    [
        # Path.absolute creates nothing.
        pytest.param(Path.absolute, "r", errno.ENOENT, Reason.BAD_ARGUMENT, id="missing"),
        pytest.param(lambda path: path.mkdir(), "r", errno.EISDIR, Reason.BAD_ARGUMENT, id="directory"),
        pytest.param(lambda path: path.mkdir(), "w", errno.EISDIR, Reason.BAD_ARGUMENT, id="directory-to-write"),
        pytest.param(lambda path: path.write_bytes(b""), "x", errno.EEXIST, Reason.OTHER, id="existing"),
        pytest.param(lambda path: path.symlink_to(path), "r", errno.ELOOP, Reason.OTHER, id="loop"),
    ],
)
def test_failed_open_has_its_errno(
    tmp_path: Path, create_path: Callable[[Path], object], mode: str, expected_errno: int, reason: Reason
) -> None:
    create_path(tmp_path / "name")
    with pytest.raises(ApiError) as error_info:
        gds.File(tmp_path / "name", mode)
    assert (error_info.value.api, error_info.value.operation) == (Api.KERNEL, "open")
    assert (error_info.value.errno, error_info.value.reason) == (expected_errno, reason)
    assert error_info.value.arguments["path"] == str(tmp_path / "name")


def test_special_file_is_refused(tmp_path: Path) -> None:
    for path in ("/dev/null", "/dev/zero"):
        with pytest.raises(UsageError):
            gds.File(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError):
        gds.File(tmp_path / "pipe")


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    path: Any = tmp_path / "file"
    path.write_bytes(b"1")
    invalid_options: Any
    for invalid_options in ({"mode": "rw"}, {"access": "fast"}, {"direct": "maybe"}):
        with pytest.raises(UsageError):
            gds.File(path, **invalid_options)
    with pytest.raises(UsageError):
        gds.read_files([path], bytearray(1), [1], access=cast("Any", "fast"))
    for invalid_options in (
        {"workers_count": 0},
        {"chunk_bytes": 0},
        {"buffers_count": -1},
        {"direct_read_bytes": 1 << 60},
    ):
        with pytest.raises(UsageError):
            gds.EngineOptions(**invalid_options)


@EVERY_MEMORY_KIND
def test_empty_file_has_no_bytes(tmp_path: Path, memory_kind: str, owner_device: Device | None) -> None:
    (tmp_path / "empty").touch()
    with (
        allocate_memory(memory_kind, MIB, owner_device) as memory,
        gds.File(tmp_path / "empty", direct="never") as file,
    ):
        assert file.read_into(memory.buffer).bytes == 0
        assert file.cached_share() == 0.0
        for length_bytes in (1, MIB):
            with pytest.raises(gds.TransferFailed) as error_info:
                file.read_into(memory.buffer, length_bytes=length_bytes)
            assert error_info.value.reason is Reason.END_OF_FILE
            assert error_info.value.partial_result.bytes == 0
        assert set(memory.read_all()) == {FILL_BYTE}


@EVERY_MEMORY_KIND
@pytest.mark.parametrize("file_offset_bytes", [FILE_BYTES, FILE_BYTES + 1, 1 << 40, (1 << 63) - 1 - 2 * MIB])
def test_offset_after_the_end_reads_nothing(
    file: gds.File, memory_kind: str, owner_device: Device | None, file_offset_bytes: int
) -> None:
    with allocate_memory(memory_kind, 2 * MIB, owner_device) as memory:
        assert file.read_into(memory.buffer, file_offset_bytes=file_offset_bytes).bytes == 0
        for length_bytes in (1, 2 * MIB):
            with pytest.raises(gds.TransferFailed) as error_info:
                file.read_into(memory.buffer, file_offset_bytes=file_offset_bytes, length_bytes=length_bytes)
            assert error_info.value.reason is Reason.END_OF_FILE
            assert error_info.value.partial_result.range_bytes == (0,)
        assert set(memory.read_all()) == {FILL_BYTE}


@EVERY_MEMORY_KIND
@pytest.mark.parametrize("length_bytes", [KIB, 200 * KIB, FILE_BYTES - 1])
def test_short_file_is_end_of_file(
    file: gds.File, seed: int, memory_kind: str, owner_device: Device | None, length_bytes: int
) -> None:
    # The file was opened when it was longer.
    os.truncate(file.path, length_bytes)
    with allocate_memory(memory_kind, FILE_BYTES, owner_device) as memory:
        with pytest.raises(gds.TransferFailed) as error_info:
            file.read_into(memory.buffer, length_bytes=FILE_BYTES)
        assert error_info.value.reason is Reason.END_OF_FILE
        assert error_info.value.arguments["transferred_bytes"] == length_bytes
        assert error_info.value.partial_result.range_bytes == (length_bytes,)
        pattern.check(memory.read_all()[:length_bytes], seed=seed)
        assert set(memory.read_all()[length_bytes:]) == {FILL_BYTE}
        with pytest.raises(gds.TransferFailed) as error_info:
            file.readv(memory.buffer, [(0, 10), (length_bytes - 3, 10), (length_bytes, 10), (1, 10)])
        assert error_info.value.partial_result.range_bytes == (10, 3, 0, 10)


# The first kind is host memory, the third kind is device memory that the file gets by DLPack.
@pytest.mark.parametrize("memory_kind", [MEMORY_KINDS[0], MEMORY_KINDS[2]], indirect=True)
@pytest.mark.parametrize(
    "invalid_options",
    [
        {"file_offset_bytes": -1},
        {"length_bytes": -1},
        {"buffer_offset_bytes": -1},
        {"buffer_offset_bytes": MIB + 1},
        {"length_bytes": MIB + 1},
        {"buffer_offset_bytes": 1, "length_bytes": MIB},
        {"buffer_offset_bytes": 1 << 64, "length_bytes": 1},
        {"length_bytes": 1 << 64},
        {"file_offset_bytes": 1 << 63},
        {"file_offset_bytes": (1 << 63) - 1, "length_bytes": MIB},
        {"file_offset_bytes": 1 << 64, "length_bytes": 1},
    ],
    ids=str,
)
def test_invalid_sizes_are_refused(
    file: gds.File, memory_kind: str, owner_device: Device | None, invalid_options: dict[str, Any]
) -> None:
    with allocate_memory(memory_kind, MIB, owner_device) as memory:
        for call in (file.read_into, file.write_from, file.start_read_into, file.start_write_from):
            with pytest.raises(UsageError):
                call(memory.buffer, **invalid_options)
        file_offset_bytes, length_bytes, buffer_offset_bytes = (
            invalid_options.get(name, 0) for name in ("file_offset_bytes", "length_bytes", "buffer_offset_bytes")
        )
        for transfer_ranges in (file.readv, file.writev):
            with pytest.raises(UsageError):
                transfer_ranges(memory.buffer, [(0, 1), (file_offset_bytes, length_bytes or MIB, buffer_offset_bytes)])
        assert set(memory.read_all()) == {FILL_BYTE}
        assert file.size_bytes == FILE_BYTES
        # The memory is unchanged and can still be used.
        assert file.read_into(memory.buffer).bytes == MIB


@EVERY_MEMORY_KIND
@pytest.mark.parametrize("access", ["automatic", "buffered", "direct"])
def test_unaligned_range_is_read(
    file: gds.File, seed: int, memory_kind: str, owner_device: Device | None, access: gds.Access
) -> None:
    file.access = access
    with allocate_memory(memory_kind, 2 * MIB + 3, owner_device) as memory:
        result = file.read_into(memory.buffer, file_offset_bytes=7, length_bytes=2 * MIB + 1, buffer_offset_bytes=1)
        assert result.bytes == 2 * MIB + 1
        pattern.check(memory.read_all()[1:-1], seed=seed, offset_bytes=7)


def test_invalid_memory_is_refused(file: gds.File) -> None:
    memory: Any
    for memory in (1, None, "text", object(), [b"1"]):
        with pytest.raises(UsageError):
            file.read_into(memory)
    for memory in (b"read-only", memoryview(b"read-only"), memoryview(bytearray(16))[::2]):
        with pytest.raises(UsageError):
            file.read_into(memory)
    with pytest.raises(UsageError):
        gds.read_files([file.path], bytearray(5), [3, 3])
    with pytest.raises(UsageError):
        gds.read_files([file.path], bytearray(5), [6])


@needs(cuda.device())
def test_array_that_overstates_its_size_is_refused(file: gds.File, device: Device) -> None:
    with device.allocate(64 * KIB) as memory:
        cuda_array = CudaArrayBuffer(memory)
        cuda_array.__cuda_array_interface__ = {**memory.__cuda_array_interface__, "shape": (1 << 40,)}
        with pytest.raises(UsageError) as error_info:
            file.read_into(cuda_array)
        assert error_info.value.reason is Reason.NOT_DEVICE_MEMORY
        # True means that the array is read-only.
        cuda_array.__cuda_array_interface__ = {**memory.__cuda_array_interface__, "data": (memory.address, True)}
        with pytest.raises(UsageError):
            file.read_into(cuda_array)
    with pytest.raises(ClosedResource):
        file.read_into(memory)


@needs(cuda.device())
def test_dlpack_memory_is_released_after_an_error(file: gds.File, device: Device) -> None:
    memory = device.allocate(MIB)
    option_sets: list[dict[str, Any]] = [{"file_offset_bytes": -1}, {"length_bytes": 2 * MIB}]
    for invalid_options in option_sets:
        with pytest.raises(UsageError):
            file.start_read_into(DlpackBuffer(memory), **invalid_options)
        with pytest.raises(UsageError):
            file.read_into(DlpackBuffer(memory), **invalid_options)
    with pytest.raises(UsageError):
        file.readv(DlpackBuffer(memory), [(-1, 1)])
    # This close would fail if a DLPack consumer still used the memory.
    memory.close()


def test_write_to_a_read_only_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    with gds.File(tmp_path / "file") as file, pytest.raises(UsageError):
        file.write_from(b"5")
    assert (tmp_path / "file").read_bytes() == b"1234"


def test_closed_file_raises_closed_resource(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    file = gds.File(tmp_path / "file", "r+")
    file.close()
    file.close()
    memory = bytearray(4)
    for transfer in (file.read_into, file.write_from, file.start_read_into, file.start_write_from):
        with pytest.raises(ClosedResource):
            transfer(memory)
    for call in (file.sync, file.fileno, file.cached_share):
        with pytest.raises(ClosedResource):
            call()
    # This would raise BufferError if a failed call still held the memory.
    memory.clear()


def test_closed_engine_is_created_again(file: gds.File, seed: int) -> None:
    for _ in range(2):
        memory = bytearray(FILE_BYTES)
        file.read_into(memory)
        pattern.check(memory, seed=seed)
        gds.close_engines()
    engine = gds.Engine()
    engine.close()
    engine.close()
    with pytest.raises(ApiError) as error_info:
        # The extent is the index of the file, the offset in the file, an address and the length.
        engine.submit(write=False, device_index=gds.HOST, files=[os.fsencode(file.path)], extents=[0, 0, 4096, 1])
    assert (error_info.value.errno, error_info.value.reason) == (errno.ESHUTDOWN, Reason.CLOSED)


# Functions of the CUDA driver that the engine calls, and that allocate memory: they pin memory, create a stream or an
# event, or copy.
CALLS_THAT_ALLOCATE = ["cuMemHostRegister_v2", "cuStreamCreate", "cuEventCreate", "cuMemcpyHtoDAsync_v2"]


@needs(cuda.device(), software("cuda"))
@pytest.mark.parametrize("function_name", CALLS_THAT_ALLOCATE)
@pytest.mark.parametrize("length_bytes", [100 * KIB, FILE_BYTES])
def test_device_out_of_memory_is_an_error(
    file: gds.File, seed: int, device: Device, function_name: str, length_bytes: int
) -> None:
    with device.allocate(FILE_BYTES) as memory:
        memory.fill(FILL_BYTE)
        with inject_faults(Api.CUDA, f"{function_name} call=* status=2"):  # CUDA_ERROR_OUT_OF_MEMORY
            if function_name == "cuEventCreate" and length_bytes == 100 * KIB:
                # A short transfer needs no event.
                assert file.read_into(memory, length_bytes=length_bytes).bytes == length_bytes
            else:
                with pytest.raises(ApiError) as error_info:
                    file.read_into(memory, length_bytes=length_bytes)
                assert (error_info.value.api, error_info.value.status) == (Api.CUDA, 2)
                assert (error_info.value.reason, error_info.value.errno) == (Reason.OUT_OF_MEMORY, None)
                if isinstance(error_info.value, gds.TransferFailed):
                    assert error_info.value.partial_result.bytes == 0
        # When the driver can allocate again, the same file and memory can be used.
        assert file.read_into(memory).bytes == FILE_BYTES
        pattern.check(memory.read(), seed=seed)


def test_repeated_result_raises_new_errors(file: gds.File) -> None:
    transfer = file.start_read_into(bytearray(FILE_BYTES), file_offset_bytes=FILE_BYTES, length_bytes=1)
    traceback_lengths = set()
    for _ in range(3):
        with pytest.raises(gds.TransferFailed) as error_info:
            transfer.result()
        assert error_info.value.partial_result.range_bytes == (0,)
        traceback_lengths.add(len(error_info.traceback))
    # If one error object were raised repeatedly, it would collect the frames of all callers and keep their variables.
    assert len(traceback_lengths) == 1
    error = transfer.exception()
    assert error is not None
    assert (error.reason, error.__traceback__) == (Reason.END_OF_FILE, None)


def test_timeouts_that_are_no_positive_number(file: gds.File) -> None:
    """In an older version, a negative timeout waited for ever, and infinity raised OverflowError."""
    transfer = file.start_read_into(bytearray(FILE_BYTES))
    for on_progress in (None, lambda _done, _total: None):
        with pytest.raises(UsageError, match="nan"):
            transfer.result(float("nan"), on_progress=on_progress)
        assert transfer.result(float("inf"), on_progress=on_progress).bytes == FILE_BYTES
        assert transfer.result(1e300, on_progress=on_progress).bytes == FILE_BYTES
        # The transfer is over, so result() has nothing to wait for.
        assert transfer.result(-1.0, on_progress=on_progress).bytes == FILE_BYTES


@needs(host.fuse)
@pytest.mark.timeout(60)
def test_negative_timeout_does_not_wait(tmp_path: Path, seed: int) -> None:
    (tmp_path / "mount").mkdir()
    with FaultyFile(tmp_path / "mount", length_bytes=4 * KIB, seed=seed) as faulty_file:
        faulty_file.send(f"gate 0 {4 * KIB}")
        with gds.File(faulty_file.path) as file:
            transfer = file.start_read_into(bytearray(4 * KIB))
            faulty_file.expect_line("waiting")
            for timeout_s in (-1.0, float("-inf"), 0.0):
                with pytest.raises(TimeoutError):
                    transfer.result(timeout_s)
                with pytest.raises(TimeoutError):
                    transfer.exception(timeout_s)
            faulty_file.send("open")


def test_failed_close_names_the_file_and_closes_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    open_count_before = handles.live().get("gds.file", 0)
    file = gds.File(tmp_path / "file", direct="never")
    os.close(file.fileno())
    with pytest.raises(ApiError) as error_info:
        file.close()
    assert (error_info.value.errno, error_info.value.arguments) == (errno.EBADF, {"path": str(tmp_path / "file")})
    assert file.closed
    assert handles.live().get("gds.file", 0) == open_count_before
    file.close()


def test_changed_list_of_paths_does_not_change_the_error(tmp_path: Path) -> None:
    paths = [tmp_path / "missing", tmp_path / "other"]
    transfer = gds.read_files(paths, bytearray(2), [1, 1])
    paths.clear()
    with pytest.raises(gds.TransferFailed) as error_info:
        transfer.result()
    assert error_info.value.arguments["path"] == str(tmp_path / "missing")


def test_changed_list_of_files_is_still_waited_for(file: gds.File) -> None:
    memory = bytearray(FILE_BYTES)
    buffer, files = gds.describe_buffer(memory, writable=True), [file]
    # One range: index of the file, offset in the file, address in memory, and length.
    extents = array("Q", [0, 0, buffer.address, FILE_BYTES])
    transfer = gds.transfer_ranges(files, extents, buffer)
    files.clear()
    extents[3] = 1
    assert transfer.result().bytes == FILE_BYTES
    file.close()
    memory.clear()  # This raises BufferError if the transfer still uses the memory.
