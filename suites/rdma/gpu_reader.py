"""Readers of GPU memory to which a NIC writes: a GPU kernel, or copies by a stream if the driver runs no kernels.

A reader waits for a flag, and then counts the words of the data that are still old. The driver compiles the kernel from
PTX, so the CUDA toolkit is not needed. The kernel gives up after a limited number of polls, so it always ends.
"""

from __future__ import annotations

import ctypes
from array import array
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from gdrkit.cuda import Device, DeviceMemory, Stream

__all__ = [
    "WORD_BYTES",
    "CopyReader",
    "KernelReader",
    "ReadResult",
    "Reader",
    "ReaderMemory",
    "make_words",
    "open_reader",
]

WORD_BYTES = 8
# Number of polls after which a kernel gives up.
POLLS_MAX = 2_000_000
_THREAD_COUNT = 256
_JIT_LOG_BYTES = 8192
# Results of cuModuleLoadDataEx on a driver that runs no PTX kernels. Any other error means that the kernel below is
# wrong.
_UNSUPPORTED_PTX_ERRORS = (
    "CUDA_ERROR_NOT_SUPPORTED",
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
    "CUDA_ERROR_JIT_COMPILATION_DISABLED",
)

_KERNEL_NAME = "read_after_flag"
PTX = """
.version 7.0
.target sm_70
.address_size 64

// Each thread reads its words of the data, polls the flag, and reads its words again. A word is new if it is first_word
// plus its index. The result has four words: threads that did not see the flag (unseen), words that were old after it
// (stale), words that were new before the first poll (early), and the largest number of polls of a thread.
.visible .entry read_after_flag(
    .param .u64 flag_address,
    .param .u64 flag_value,
    .param .u64 data_address,
    .param .u64 words_count,
    .param .u64 first_word,
    .param .u64 polls_max,
    .param .u64 result_address
)
{
    .reg .pred is_end, is_counted, is_seen;
    .reg .u32 special_register;
    .reg .u64 flag, expected_flag, data, count, first, polls_limit, result;
    .reg .u64 thread, thread_count, index, address, word, expected, polls, early, stale, unseen;

    ld.param.u64 flag, [flag_address];
    ld.param.u64 expected_flag, [flag_value];
    ld.param.u64 data, [data_address];
    ld.param.u64 count, [words_count];
    ld.param.u64 first, [first_word];
    ld.param.u64 polls_limit, [polls_max];
    ld.param.u64 result, [result_address];
    cvta.to.global.u64 flag, flag;
    cvta.to.global.u64 data, data;
    cvta.to.global.u64 result, result;
    mov.u32 special_register, %tid.x;
    cvt.u64.u32 thread, special_register;
    mov.u32 special_register, %ntid.x;
    cvt.u64.u32 thread_count, special_register;
    mov.u64 polls, 0;
    mov.u64 early, 0;
    mov.u64 stale, 0;
    mov.u64 unseen, 0;

    // This loop leaves old data in the caches. The reads after the flag must not return this old data.
    mov.u64 index, thread;
read_before:
    setp.ge.u64 is_end, index, count;
    @is_end bra poll;
    shl.b64 address, index, 3;
    add.u64 address, address, data;
    ld.global.u64 word, [address];
    add.u64 expected, first, index;
    setp.eq.u64 is_counted, word, expected;
    @is_counted add.u64 early, early, 1;
    add.u64 index, index, thread_count;
    bra read_before;

poll:
    add.u64 polls, polls, 1;
    ld.acquire.sys.global.u64 word, [flag];
    setp.eq.u64 is_seen, word, expected_flag;
    @is_seen bra seen;
    setp.lt.u64 is_end, polls, polls_limit;
    @is_end bra poll;
    mov.u64 unseen, 1;
    bra done;

seen:
    fence.acq_rel.sys;
    mov.u64 index, thread;
read_after:
    setp.ge.u64 is_end, index, count;
    @is_end bra done;
    shl.b64 address, index, 3;
    add.u64 address, address, data;
    ld.global.u64 word, [address];
    add.u64 expected, first, index;
    setp.ne.u64 is_counted, word, expected;
    @is_counted add.u64 stale, stale, 1;
    add.u64 index, index, thread_count;
    bra read_after;

done:
    red.global.add.u64 [result], unseen;
    red.global.add.u64 [result + 8], stale;
    red.global.add.u64 [result + 16], early;
    red.global.max.u64 [result + 24], polls;
    ret;
}
"""
_RESULT_WORDS_COUNT = 4


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The observation of a reader in one round.

    Attributes
    ----------
    is_flag_seen : bool
        Whether the flag had the value of the round before the reader gave up.
    stale_words_count : int
        Number of words of the data that were old after the flag was seen.
    early_words_count : int
        Number of words that were new before the first poll. If it is less than the number of all words, the reader
        began before all writes had arrived.
    polls_count : int
        Number of reads of the flag.
    """

    is_flag_seen: bool
    stale_words_count: int
    early_words_count: int
    polls_count: int


@dataclass(frozen=True, slots=True)
class ReaderMemory:
    """The words of the data, which begin at the first byte of `data_memory`, and the flag, which is one word."""

    data_memory: DeviceMemory
    words_count: int
    flag_memory: DeviceMemory
    flag_offset_bytes: int


class Reader(Protocol):
    """A reader that works in `stream`. Use it as a context manager.

    `obstacle` states why the reader is not a kernel. The text is empty for a kernel.
    """

    type_name: str
    stream: Stream
    obstacle: str

    def start(self, round_number: int, *, is_polling: bool) -> None:
        """Queue the read of a round. With `is_polling`, the reader polls the flag; otherwise it reads the flag once."""

    def finish(self) -> ReadResult:
        """Wait for the read and return what it observed."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class NoKernelsError(Exception):
    """The driver cannot run a kernel that is given as PTX."""


def make_words(round_number: int, words_count: int) -> array[int]:
    """Return the words of the data in a round. Words of other rounds or other indexes are different."""
    first_word = _compute_first_word(round_number)
    return array("Q", range(first_word, first_word + words_count))


def _compute_first_word(round_number: int) -> int:
    return round_number << 32


def open_reader(device: Device, reader_memory: ReaderMemory) -> Reader:
    """Return a KernelReader, or a CopyReader if the driver cannot run kernels."""
    try:
        return KernelReader(device, reader_memory)
    except NoKernelsError as error:
        return CopyReader(device, reader_memory, obstacle=str(error))


class KernelReader:
    """A reader that is a kernel with one block of threads."""

    type_name = "kernel"
    obstacle = ""

    def __init__(self, device: Device, reader_memory: ReaderMemory) -> None:
        self._reader_memory = reader_memory
        with ExitStack() as stack:
            self._kernel = _load_kernel(device, stack)
            self.stream = stack.enter_context(device.stream())
            self._result_memory = stack.enter_context(device.allocate(_RESULT_WORDS_COUNT * WORD_BYTES))
            self._stack = stack.pop_all()

    def start(self, round_number: int, *, is_polling: bool) -> None:
        """Launch the kernel."""
        from cuda.bindings import driver

        reader_memory = self._reader_memory
        arguments = (
            reader_memory.flag_memory.address + reader_memory.flag_offset_bytes,
            round_number,
            reader_memory.data_memory.address,
            reader_memory.words_count,
            _compute_first_word(round_number),
            POLLS_MAX if is_polling else 1,
            self._result_memory.address,
        )
        self.stream.fill(self._result_memory, 0)
        kernel_parameters = (arguments, (ctypes.c_uint64,) * len(arguments))
        stream = driver.CUstream(self.stream.handle)
        # The grid has one block of _THREAD_COUNT threads, without dynamic shared memory.
        with self.stream.current():
            result = driver.cuLaunchKernel(self._kernel, 1, 1, 1, _THREAD_COUNT, 1, 1, 0, stream, kernel_parameters, 0)
        _require_success(result, "cuLaunchKernel")

    def finish(self) -> ReadResult:
        """Wait for the kernel and return what it counted."""
        # start() cannot queue this copy, because a copy to pageable memory returns only after the kernel has ended.
        result_bytes = bytearray(_RESULT_WORDS_COUNT * WORD_BYTES)
        self.stream.read_into(self._result_memory, result_bytes)
        self.stream.synchronize()
        unseen_count, stale_count, early_count, polls_count = array("Q", bytes(result_bytes))
        return ReadResult(unseen_count == 0, stale_count, early_count, polls_count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class CopyReader:
    """A reader that copies the flag and then the data to the host. The copies begin only in :meth:`finish`."""

    type_name = "stream_copy"

    def __init__(self, device: Device, reader_memory: ReaderMemory, *, obstacle: str) -> None:
        self._reader_memory = reader_memory
        self._round_number = 0
        self.obstacle = obstacle
        self.stream = device.stream()

    def start(self, round_number: int, *, is_polling: bool) -> None:  # noqa: ARG002 - finish() reads the flag once.
        """Set the round whose flag and data :meth:`finish` expects."""
        self._round_number = round_number

    def finish(self) -> ReadResult:
        """Copy the flag once, and the data if the flag has the value of this round."""
        reader_memory = self._reader_memory
        flag_bytes, data_bytes = bytearray(WORD_BYTES), bytearray(reader_memory.words_count * WORD_BYTES)
        self.stream.read_into(reader_memory.flag_memory, flag_bytes, offset_bytes=reader_memory.flag_offset_bytes)
        self.stream.synchronize()
        if int.from_bytes(flag_bytes, "little") != self._round_number:
            return ReadResult(is_flag_seen=False, stale_words_count=0, early_words_count=0, polls_count=1)
        self.stream.read_into(reader_memory.data_memory, data_bytes)
        self.stream.synchronize()
        expected_words = make_words(self._round_number, reader_memory.words_count)
        stale_count = 0
        if data_bytes != expected_words.tobytes():
            words = array("Q", bytes(data_bytes))
            stale_count = sum(word != expected for word, expected in zip(words, expected_words, strict=True))
        # All words count as early, because this reader never overlaps with the writes.
        return ReadResult(
            is_flag_seen=True, stale_words_count=stale_count, early_words_count=reader_memory.words_count, polls_count=1
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


def _load_kernel(device: Device, stack: ExitStack) -> Any:  # noqa: ANN401 - the bindings have no types.
    """Compile the kernel and return its function. `stack` unloads it."""
    from cuda.bindings import driver

    jit_log = bytearray(_JIT_LOG_BYTES)
    options = {
        driver.CUjit_option.CU_JIT_ERROR_LOG_BUFFER: jit_log,
        driver.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: len(jit_log),
    }
    with device.current():
        result, module = driver.cuModuleLoadDataEx(
            PTX.encode() + b"\0", len(options), list(options), list(options.values())
        )
        if result.name in _UNSUPPORTED_PTX_ERRORS:
            message = f"cuModuleLoadDataEx: {result.name}"
            raise NoKernelsError(message)
        _require_success(
            (result,), f"cuModuleLoadDataEx: {jit_log.partition(bytes(1))[0].decode(errors='replace').strip()}"
        )
        stack.callback(_unload_kernel, device, module)
        return _require_success(driver.cuModuleGetFunction(module, _KERNEL_NAME.encode()), "cuModuleGetFunction")


def _unload_kernel(device: Device, module: Any) -> None:  # noqa: ANN401
    from cuda.bindings import driver

    with device.current():
        _require_success(driver.cuModuleUnload(module), "cuModuleUnload")


def _require_success(call_result: tuple[Any, ...], operation: str) -> Any:  # noqa: ANN401
    """Return the value in the result (CUresult, value) of a call of the bindings, or None if there is none."""
    assert int(call_result[0]) == 0, f"{operation}: {call_result[0].name}"
    return call_result[1] if len(call_result) > 1 else None
