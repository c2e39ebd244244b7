"""Litmus cases of visibility: NICs write data and then a flag to GPU memory, and a GPU kernel or copy reads both.

``python -m rdma.litmus`` runs all cases in a process of its own, in which the software twin (an emulated GPU) can have
another write ordering. It prints for each shape and method whether the GPU saw the new flag and the new data.
"""

from __future__ import annotations

import enum
import itertools
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rdma.gpu_reader import WORD_BYTES, ReaderMemory, make_words, open_reader

from gdrkit import cuda, verbs
from gdrkit.registration import Ordering, register
from gdrkit.units import KIB

if TYPE_CHECKING:
    from rdma.gpu_reader import ReadResult

    from gdrkit.cuda import Device, DeviceMemory
    from gdrkit.registration import Registration
    from gdrkit.verbs import Nic, QueuePair

__all__ = ["SHAPES", "DataOperation", "FlagPlace", "Litmus", "Method", "Shape", "VisibilityResult"]

WORDS_COUNT = 64 * KIB // WORD_BYTES
LENGTH_BYTES = WORDS_COUNT * WORD_BYTES
_TIMEOUT_MS = 10_000.0


class DataOperation(enum.Enum):
    """The operation by which a NIC puts the data into the memory of the GPU."""

    WRITE = "write"
    READ = "read"
    SEND = "send"


class FlagPlace(enum.Enum):
    """The region that contains the flag, and the NIC that sets the flag by RDMA WRITE."""

    SAME_REGION = "same_region"  # The flag is behind the data, in the region of the data.
    OTHER_REGION = "other_region"
    OTHER_NIC = "other_nic"  # The flag is in another region, and is written by another NIC than the data.


@dataclass(frozen=True, slots=True)
class Shape:
    """The operation that moves the data into the memory of the GPU, and the place of the flag that follows the data."""

    data_operation: DataOperation
    flag_place: FlagPlace

    @property
    def name(self) -> str:
        """The name of the shape in case ids and messages."""
        return f"{self.data_operation.value}-{self.flag_place.value}"

    @property
    def is_in_order(self) -> bool:
        """Whether the queue pair orders the flag after the data, so that both can be posted at once.

        A flag that another queue pair writes, and a flag after a READ, are not ordered.
        """
        return self.flag_place is not FlagPlace.OTHER_NIC and self.data_operation is not DataOperation.READ


SHAPES = tuple(itertools.starmap(Shape, itertools.product(DataOperation, FlagPlace)))


class Method(enum.Enum):
    """The method that orders the read of the GPU after the writes of the NICs."""

    NO_FLUSH = "no_flush"  # The read starts after the completions.
    MAKE_VISIBLE = "make_visible"  # The read starts after the completions and Ordering.make_visible.
    HOST_FLUSH = "host_flush"  # The read starts after the completions and cuFlushGPUDirectRDMAWrites.
    STREAM_FLUSH = "stream_flush"  # The stream of the read flushes first: CU_STREAM_WAIT_VALUE_FLUSH.
    POLLING = "polling"  # The read polls the flag while the NICs write, and orders its loads by a fence.


@dataclass(slots=True)
class VisibilityResult:
    """The observations of the reader in all rounds of a method.

    Attributes
    ----------
    reader : str
        Type of the reader: ``kernel`` or ``stream_copy``.
    rounds_count : int
        Number of rounds.
    overlapping_rounds_count : int
        Number of rounds in which the reader began before all data had arrived.
    unseen_flags_count : int
        Number of rounds in which the reader gave up before it saw the flag. After the first such round, no
        further round runs.
    stale_reads_count : int
        Number of words that were old after the flag was seen.
    polls_count_max : int
        Largest number of polls in a round.
    """

    reader: str
    rounds_count: int = 0
    overlapping_rounds_count: int = 0
    unseen_flags_count: int = 0
    stale_reads_count: int = 0
    polls_count_max: int = 0

    @property
    def is_visible(self) -> bool:
        """Whether the reader saw the new flag and the new data in every round."""
        return self.rounds_count > 0 and not self.unseen_flags_count and not self.stale_reads_count

    def add(self, read_result: ReadResult) -> None:
        """Add what the reader observed in a round."""
        self.rounds_count += 1
        self.overlapping_rounds_count += read_result.early_words_count < WORDS_COUNT
        self.unseen_flags_count += not read_result.is_flag_seen
        self.stale_reads_count += read_result.stale_words_count
        self.polls_count_max = max(self.polls_count_max, read_result.polls_count)


class Litmus:
    """GPU memory for data and flag, NICs that write to it, and a reader. Use it as a context manager."""

    def __init__(self, device: Device, nics: tuple[Nic, ...], shape: Shape) -> None:
        self.device, self.shape = device, shape
        self._data_nic = nics[0]
        self._flag_nic = nics[-1] if shape.flag_place is FlagPlace.OTHER_NIC else self._data_nic
        self._round_number = 0
        with ExitStack() as stack:
            self._data_memory, self._data_registration = self._register_memory(stack, LENGTH_BYTES + WORD_BYTES)
            self._flag_memory, self._flag_registration, flag_offset_bytes = (
                (self._data_memory, self._data_registration, LENGTH_BYTES)
                if shape.flag_place is FlagPlace.SAME_REGION
                else (*self._register_memory(stack, WORD_BYTES), 0)
            )
            self._flag_offset_bytes = flag_offset_bytes
            self._zero_word = stack.enter_context(device.allocate(WORD_BYTES))
            self._zero_word.fill(0)
            self._data_requester, self._data_responder = self._connect_pairs(stack, self._data_nic)
            self._flag_requester = (
                self._data_requester
                if self._flag_nic is self._data_nic
                else self._connect_pairs(stack, self._flag_nic)[0]
            )
            self._host_data, self._host_flag = bytearray(LENGTH_BYTES), bytearray(WORD_BYTES)
            self._host_data_region = stack.enter_context(self._data_nic.register_host(self._host_data))
            self._host_flag_region = stack.enter_context(self._flag_nic.register_host(self._host_flag))
            reader_memory = ReaderMemory(self._data_memory, WORDS_COUNT, self._flag_memory, flag_offset_bytes)
            self.reader = stack.enter_context(open_reader(device, reader_memory))
            self._stack = stack.pop_all()

    def run(self, method: Method, *, duration_s: float = 0.0) -> VisibilityResult:
        """Repeat the shape for `duration_s`, but at least once, and return what the reader observed."""
        result = VisibilityResult(self.reader.type_name)
        deadline_s = time.monotonic() + duration_s
        while not result.unseen_flags_count:
            result.add(self._run_round(method))
            if time.monotonic() >= deadline_s:
                break
        return result

    def _run_round(self, method: Method) -> ReadResult:
        self._round_number += 1
        self._host_data[:] = make_words(self._round_number, WORDS_COUNT).tobytes()
        self._host_flag[:] = self._round_number.to_bytes(WORD_BYTES, "little")
        if method is Method.POLLING:
            self.reader.start(self._round_number, is_polling=True)
            self._transfer()
        else:
            self._transfer()
            self._flush(method)
            self.reader.start(self._round_number, is_polling=False)
        return self.reader.finish()

    def _transfer(self) -> None:
        """Move the data and then the flag, and wait for the completions."""
        self._post_data()
        if self.shape.is_in_order:
            self._post_flag()
            self._wait_for_data()
        else:
            self._wait_for_data()
            self._post_flag()
        self._flag_requester.wait(_TIMEOUT_MS).expect()

    def _post_data(self) -> None:
        region = self._data_registration.region(self._data_nic)
        match self.shape.data_operation:
            case DataOperation.WRITE:
                self._data_requester.post_write(
                    self._host_data_region, region.remote(length_bytes=LENGTH_BYTES), work_id=1
                )
            case DataOperation.READ:
                self._data_requester.post_read(
                    region, self._host_data_region.remote(), work_id=1, length_bytes=LENGTH_BYTES
                )
            case DataOperation.SEND:
                self._data_responder.post_receive(region, work_id=2, length_bytes=LENGTH_BYTES)
                self._data_requester.post_send(self._host_data_region, work_id=1)

    def _wait_for_data(self) -> None:
        if self.shape.data_operation is DataOperation.SEND:
            self._data_responder.wait_received(_TIMEOUT_MS).expect()
        self._data_requester.wait(_TIMEOUT_MS).expect()

    def _post_flag(self) -> None:
        flag_range = self._flag_registration.remote(
            self._flag_nic, offset_bytes=self._flag_offset_bytes, length_bytes=WORD_BYTES
        )
        self._flag_requester.post_write(self._host_flag_region, flag_range, work_id=3)

    def _flush(self, method: Method) -> None:
        if method is Method.MAKE_VISIBLE:
            Ordering.of(self.device).make_visible(self.device)
        elif method is Method.HOST_FLUSH:
            self.device.flush_remote_writes()
        elif method is Method.STREAM_FLUSH:
            self._flush_in_stream()

    def _flush_in_stream(self) -> None:
        """Queue a wait with a flush. The awaited word is 0 already, so the wait ends at once, and the flush follows."""
        from cuda.bindings import driver

        wait_flags = driver.CUstreamWaitValue_flags
        wait_and_flush_flags = wait_flags.CU_STREAM_WAIT_VALUE_EQ | wait_flags.CU_STREAM_WAIT_VALUE_FLUSH
        stream = self.reader.stream
        with stream.current():
            (result,) = driver.cuStreamWaitValue32(
                driver.CUstream(stream.handle), self._zero_word.address, 0, int(wait_and_flush_flags)
            )
        assert int(result) == 0, f"cuStreamWaitValue32: {result.name}"

    def _register_memory(self, stack: ExitStack, length_bytes: int) -> tuple[DeviceMemory, Registration]:
        memory = stack.enter_context(self.device.allocate(length_bytes))
        memory.fill(0)
        nics = dict.fromkeys([self._data_nic, self._flag_nic])
        return memory, stack.enter_context(register(memory, list(nics)))

    @staticmethod
    def _connect_pairs(stack: ExitStack, nic: Nic) -> tuple[QueuePair, QueuePair]:
        """Return two queue pairs of a NIC that are connected to each other."""
        first_pair, second_pair = (
            stack.enter_context(nic.queue_pair(stack.enter_context(nic.completion_queue()))) for _ in range(2)
        )
        first_pair.connect(second_pair.endpoint())
        second_pair.connect(first_pair.endpoint())
        return first_pair, second_pair

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _main() -> None:
    visibility_by_shape: dict[str, dict[str, bool]] = {}
    with ExitStack() as stack:
        device = stack.enter_context(cuda.Device(0))
        nics = tuple(stack.enter_context(nic) for nic in verbs.open_active_nics())
        for shape in SHAPES:
            with Litmus(device, nics, shape) as litmus:
                visibility_by_shape[shape.name] = {method.value: litmus.run(method).is_visible for method in Method}
    sys.stdout.write(json.dumps(visibility_by_shape) + "\n")


if __name__ == "__main__":
    _main()
