"""Program that runs one scenario of cuFile calls: ``python cufile_child.py SCENARIO``.

:mod:`support.cufile_scenarios` starts a new process for each scenario, for two reasons. libcufile keeps its settings,
statistics and threads until the process ends, and a libcufile call that hangs ends only with the process.

The process reads the arguments of the scenario as JSON from standard input. It writes the result of the scenario as
JSON to the file descriptor `result_fd` of the arguments.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.cufile_calls import (
    CALLS,
    FILE_BYTES,
    HOST_TREE,
    RANGE_BYTES,
    ScenarioSetup,
    call_to_json,
    error_to_json,
    make_batch_requests,
    proof_to_json,
)

from gdrkit import cuda, cufile, evidence, serialization
from gdrkit.cufile import parameters
from gdrkit.errors import ApiError, GdrkitError, UsageError
from gdrkit.inventory.facts import select_substrate_libraries
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SCENARIOS", "main"]


def every_call(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make one call of each kind that ``calls`` in the arguments names.

    Return for each call the number of bytes, whether the data is right, the proof of the route, and the number of
    writes that were repeated because they wrote no byte.
    """
    setup = ScenarioSetup(arguments)
    results: list[dict[str, Any]] = []
    for call_name in arguments["calls"]:
        setup.restore_file()
        setup.zero_memory()
        setup.empty_write_count = 0
        with cufile.FileHandle(setup.driver, setup.fd) as handle:
            try:
                with setup.monitor.watch(setup.fd):
                    moved_bytes, is_data_correct = CALLS[call_name](setup, handle)
            except GdrkitError as error:
                results.append({"failure": error_to_json(error)})
            else:
                proof = proof_to_json(setup.monitor.proof)
                results.append(
                    {
                        "bytes": moved_bytes,
                        "is_data_correct": is_data_correct,
                        "proof": proof,
                        "empty_write_count": setup.empty_write_count,
                    }
                )
    properties = serialization.to_json_data(setup.driver.properties())
    setup.close()
    return {"calls": results, "properties": properties}


def one_read(arguments: dict[str, Any]) -> dict[str, Any]:
    """Read the start of the file with one cuFileRead call.

    Return the proof of its route, or the error if cuFileHandleRegister or cuFileRead failed.
    """
    setup = ScenarioSetup(arguments)
    length_bytes = int(arguments.get("length_bytes", FILE_BYTES))
    result: dict[str, Any] = {}
    try:
        handle = cufile.FileHandle(setup.driver, setup.fd)
    except ApiError as error:
        result = {
            "failure": error_to_json(error),
            "proof": proof_to_json(cufile.failed_registration_proof(HOST_TREE, setup.fd, error)),
        }
    else:
        with handle:
            try:
                with setup.monitor.watch(setup.fd):
                    moved_bytes = handle.read(setup.memory, length_bytes=length_bytes)
                result = {
                    "bytes": moved_bytes,
                    "is_data_correct": setup.has_file_data(length_bytes),
                    "proof": proof_to_json(setup.monitor.proof),
                }
                setup.monitor.proof.require_direct()
            except cufile.DirectPathError as error:
                result["fell_back"] = error_to_json(error)
            except ApiError as error:
                result = {"failure": error_to_json(error)}
    setup.close()
    return result


def bad_input(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make calls with invalid arguments, and then a valid call."""
    setup = ScenarioSetup(arguments)
    memory, driver = setup.memory, setup.driver
    folder_fd = os.open(setup.path.parent, os.O_RDONLY)
    # No open descriptor of this process has this number.
    unused_fd = 999_999
    with cufile.FileHandle(driver, setup.fd) as handle:
        results: dict[str, dict[str, Any]] = {
            "negative_offset": call_to_json(lambda: handle.read(memory, file_offset_bytes=-1)),
            "overflowing_offset": call_to_json(lambda: handle.read(memory, file_offset_bytes=(1 << 63) - 1)),
            "negative_length": call_to_json(lambda: handle.read(memory, length_bytes=-1)),
            "beyond_memory": call_to_json(lambda: handle.read(memory, offset_bytes=1, length_bytes=FILE_BYTES)),
            "beyond_end": call_to_json(lambda: handle.read(memory, file_offset_bytes=2 * FILE_BYTES)),
            "over_the_end": call_to_json(lambda: handle.read(memory, file_offset_bytes=FILE_BYTES - RANGE_BYTES)),
            "nothing": call_to_json(lambda: handle.read(memory, length_bytes=0)),
            "directory": call_to_json(lambda: cufile.FileHandle(driver, folder_fd)),
            "closed_descriptor": call_to_json(lambda: cufile.FileHandle(driver, unused_fd)),
            "twice": call_to_json(lambda: cufile.FileHandle(driver, setup.fd)),
            "no_batch": call_to_json(lambda: cufile.IoBatch(driver, 0)),
            "large_batch": call_to_json(lambda: cufile.IoBatch(driver, 100_000)),
            # No stream has the handle 0x1234560. Only the twin, a library that emulates libcufile, checks the handle.
            "no_stream": call_to_json(lambda: cufile.RegisteredStream(driver, 0x1234560))
            if arguments.get("twin")
            else {},
            "parameter_while_open": call_to_json(
                lambda: parameters.set_flag(parameters.Flag.ALLOW_COMPAT_MODE, True)  # noqa: FBT003
            ),
            "level": call_to_json(lambda: driver.statistics.start(cufile.Level.OFF)),
        }
        with cufile.RegisteredBuffer(driver, memory):
            results["registered_twice"] = call_to_json(lambda: cufile.RegisteredBuffer(driver, memory))
        driver.statistics.start()
        results["still_works"] = call_to_json(lambda: (handle.read(memory), setup.has_file_data(FILE_BYTES)))
        closed_handle = handle
    results["closed_handle"] = call_to_json(lambda: closed_handle.read(memory))
    os.close(folder_fd)
    setup.close()
    results["closed_driver"] = call_to_json(driver.properties)
    return results


def read_only_file(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a write to a file that is open for reading only."""
    setup = ScenarioSetup(arguments)
    fd = os.open(setup.path, os.O_RDONLY | os.O_DIRECT)
    with cufile.FileHandle(setup.driver, fd) as handle:
        result = call_to_json(lambda: handle.write(setup.memory))
    os.close(fd)
    setup.close()
    return result


def staged_parameters(arguments: dict[str, Any]) -> dict[str, Any]:
    """Query and set parameters of cuFile before and after the driver is opened."""
    flags = {flag.name: call_to_json(functools.partial(parameters.flag, flag)) for flag in parameters.Flag}
    result = {
        "flags": flags,
        "set_closed": call_to_json(lambda: parameters.set_size(parameters.Size.IO_BATCHSIZE, 32)),
        "batch_staged": parameters.size(parameters.Size.IO_BATCHSIZE),
        "batch_limits": parameters.limits(parameters.Size.IO_BATCHSIZE),
        "negative": call_to_json(lambda: parameters.set_size(parameters.Size.IO_BATCHSIZE, -1)),
        "log_level": call_to_json(lambda: parameters.text(parameters.Text.LOGGING_LEVEL)),
    }
    with cufile.Driver(timeout_s=None) as driver:
        result["batch_open"] = driver.properties().max_batch_io
        result["set_while_open"] = call_to_json(lambda: parameters.set_size(parameters.Size.IO_BATCHSIZE, 16))
        result["use_count"] = driver.use_count()
    return result


@dataclass(frozen=True, slots=True)
class _MemoryWithoutContext:
    """Memory whose CUDA context gdrkit does not make current before a call."""

    address: int
    length_bytes: int
    closed: bool = False

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class _StreamWithoutContext:
    """A stream whose CUDA context gdrkit does not make current before a call."""

    stream: cuda.Stream

    @property
    def handle(self) -> int:
        return self.stream.handle

    @property
    def closed(self) -> bool:
        return self.stream.closed

    def query(self) -> bool:
        return self.stream.query()

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def without_context(arguments: dict[str, Any]) -> dict[str, Any]:
    """Make calls in a thread that has no current CUDA context."""
    setup = ScenarioSetup(arguments)
    memory = _MemoryWithoutContext(setup.memory.address, setup.memory.length_bytes)

    def read_async() -> int:
        transfer = handle.read_async(_StreamWithoutContext(stream), memory)
        stream.synchronize()
        return transfer.bytes()

    with cufile.FileHandle(setup.driver, setup.fd) as handle, setup.device.stream() as stream:
        result = {
            "read": call_to_json(lambda: (handle.read(memory), setup.has_file_data(FILE_BYTES))),
            "batch": call_to_json(lambda: CALLS["batch_read"](setup, handle)[0]),
            "register": call_to_json(lambda: cufile.RegisteredBuffer(setup.driver, memory)),
            "register_stream": call_to_json(lambda: cufile.RegisteredStream(setup.driver, stream.handle)),
            "read_async": call_to_json(read_async),
        }
        # With `setup.memory`, gdrkit makes the CUDA context current, so this thread can register the memory.
        with cufile.RegisteredBuffer(setup.driver, setup.memory):
            result["registered"] = call_to_json(lambda: (handle.read(setup.memory), setup.has_file_data(FILE_BYTES)))
    setup.close()
    return result


def pending_read(arguments: dict[str, Any]) -> dict[str, Any]:
    """Query an asynchronous read before and after its stream has executed the read."""
    setup = ScenarioSetup(arguments)
    with cufile.FileHandle(setup.driver, setup.fd) as handle, setup.device.stream() as stream:
        transfer = handle.read_async(stream, setup.memory)
        result: dict[str, Any] = {
            "done": transfer.done,
            "bytes": call_to_json(transfer.bytes),
            "close": call_to_json(handle.close),
        }
        stream.synchronize()
        result |= {
            "done_later": transfer.done,
            "bytes_later": transfer.bytes(),
            "is_data_correct": setup.has_file_data(FILE_BYTES),
        }
    setup.close()
    return result


def several_streams(arguments: dict[str, Any]) -> dict[str, Any]:
    """Read each quarter of the file on a stream of its own.

    If gdrkit refuses a read on another stream, wait for the previous stream, and queue the read again.
    """
    setup = ScenarioSetup(arguments)
    part_bytes = FILE_BYTES // 4
    refusals: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        handle = stack.enter_context(cufile.FileHandle(setup.driver, setup.fd))
        if arguments["is_registered"]:
            stack.enter_context(cufile.RegisteredBuffer(setup.driver, setup.memory))
        streams = [stack.enter_context(setup.device.stream()) for _ in range(4)]

        def queue_read(index: int) -> cufile.PendingTransfer:
            offset_bytes = index * part_bytes
            return handle.read_async(
                streams[index],
                setup.memory,
                file_offset_bytes=offset_bytes,
                offset_bytes=offset_bytes,
                length_bytes=part_bytes,
            )

        pending_reads = []
        for index in range(4):
            try:
                pending_reads.append(queue_read(index))
            except UsageError as error:
                refusals.append(error_to_json(error))
                streams[index - 1].synchronize()
                pending_reads.append(queue_read(index))
        for stream in streams:
            stream.synchronize()
        result = {
            "bytes": [transfer.bytes() for transfer in pending_reads],
            "is_data_correct": setup.has_file_data(FILE_BYTES),
            "refusals": refusals,
            "address": setup.memory.address,
            "streams": [stream.handle for stream in streams],
        }
    setup.close()
    return result


def driver_opens(arguments: dict[str, Any]) -> dict[str, Any]:
    """Set the flags that the arguments name, and open the driver."""
    for flag_name, is_set in arguments["flags"].items():
        parameters.set_flag(parameters.Flag[flag_name], is_set)
    return call_to_json(lambda: cufile.Driver(timeout_s=None))


def batch_stall(arguments: dict[str, Any]) -> dict[str, Any]:
    """Query and cancel a batch of four reads. The fault plan of the case keeps the second read from starting."""
    setup = ScenarioSetup(arguments)
    with cufile.FileHandle(setup.driver, setup.fd) as handle, cufile.IoBatch(setup.driver, 8) as batch:
        batch.submit(make_batch_requests(setup, handle, cufile.Opcode.READ, 4))
        first_events = batch.fetch_events(count_min=1)
        stalled_events = batch.fetch_events(count_min=1, timeout_s=0.05)
        batch.cancel()
        canceled_events = batch.fetch_events(count_min=batch.outstanding, timeout_s=5)
        result = {
            "first": [event.status.name for event in first_events],
            "stalled": [event.status.name for event in stalled_events],
            "canceled": [event.status.name for event in canceled_events],
            "outstanding": batch.outstanding,
            "is_data_correct": setup.has_file_data(RANGE_BYTES),
        }
    setup.close()
    return result


def by_kvikio(arguments: dict[str, Any]) -> dict[str, Any]:
    """Read and write by kvikio in each compatibility mode that the arguments name."""
    from gdrkit.cufile import _kvikio

    setup = ScenarioSetup(arguments)
    results: dict[str, Any] = {}
    for compat_mode in arguments["modes"]:
        setup.restore_file()
        setup.zero_memory()
        with _kvikio.apply_settings(
            _kvikio.KvikioSettings(thread_count=2, task_bytes=256 * KIB, compat_mode=compat_mode)
        ):
            with _kvikio.KvikioFile(setup.path) as file, setup.monitor.watch(setup.fd):
                moved_bytes = file.read(setup.memory).bytes()
            results[compat_mode] = {
                "read": moved_bytes,
                "is_data_correct": setup.has_file_data(FILE_BYTES),
                "proof": proof_to_json(setup.monitor.proof),
            }
            setup.fill_memory_for_writing()
            with _kvikio.KvikioFile(setup.path, "r+") as file:
                results[compat_mode] |= {
                    "write": file.write(setup.memory).bytes(),
                    "written": setup.is_file_written(FILE_BYTES),
                }
    results["missing"] = call_to_json(lambda: _kvikio.KvikioFile(setup.path.parent / "missing"))
    results["version"] = _kvikio.kvikio_version()
    setup.close()
    return results


def driver_twice(arguments: dict[str, Any]) -> dict[str, Any]:
    """Open the driver twice, and close it twice."""
    with cufile.Driver(timeout_s=None) as first_driver:
        with cufile.Driver(timeout_s=None):
            count_while_both_open = first_driver.use_count()
        count_while_one_open = first_driver.use_count()
    return {
        "while_both_open": count_while_both_open,
        "while_one_open": count_while_one_open,
        "version": cufile.library_version(),
    }


SCENARIOS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        every_call,
        one_read,
        bad_input,
        read_only_file,
        staged_parameters,
        without_context,
        pending_read,
        several_streams,
        driver_opens,
        batch_stall,
        by_kvikio,
        driver_twice,
    )
}


def main() -> None:
    """Run the scenario that the command line names."""
    arguments = json.load(sys.stdin)
    result = SCENARIOS[sys.argv[1]](arguments)
    result["libraries"] = serialization.to_json_data(select_substrate_libraries(evidence.libraries()))
    with os.fdopen(arguments["result_fd"], "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
