"""`gdrkit.safetensors` loads model files into memory of the host, of one GPU or of two: data types, slices, errors."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from models.model_files import TENSORS_OF_EVERY_TYPE, ModelFile, pack_file, write_model
from support.faults import inject_faults
from support.gds import drop_from_cache

from gdrkit import gds, handles
from gdrkit.cuda import borrow
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, UsageError
from gdrkit.harness.needs import cuda, host, needs, software
from gdrkit.safetensors import (
    LoadedTensors,
    ModelTensor,
    load_file,
    load_files,
    safe_open,
    save_file,
    start_load_files,
)
from gdrkit.safetensors.tensors import TensorBuffer
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gdrkit.cuda import Device
    from gdrkit.gds import Access

DEVICE_ARGUMENTS = [
    pytest.param("cpu", id="host"),
    pytest.param("cuda", marks=needs(cuda.device()), id="device"),
]
ON_EVERY_DEVICE = pytest.mark.parametrize("device_argument", DEVICE_ARGUMENTS)
# In the file, the data of these tensors begin at the offsets 0, 602, 4602, 4605 and 4885 after the header. In memory,
# the loader aligns each tensor of at least 256 bytes to 16 bytes.
UNALIGNED_TENSORS = (
    ("a", "BF16", (301,)),
    ("b", "F32", (1000,)),
    ("c", "U8", (3,)),
    ("d", "C64", (5, 7)),
    ("e", "BF16", (99, 3)),
)


def read_tensor_data(tensors: Mapping[str, ModelTensor]) -> dict[str, bytes]:
    """Return the bytes of each tensor."""
    return {name: tensor.read() for name, tensor in tensors.items()}


@ON_EVERY_DEVICE
# With own_memory, each tensor has its own allocation. Otherwise the tensors of a file share one.
@pytest.mark.parametrize("own_memory", [False, True], ids=["one-memory", "own-memory"])
@pytest.mark.parametrize("tensors", [TENSORS_OF_EVERY_TYPE, UNALIGNED_TENSORS], ids=["every-type", "unaligned"])
def test_every_tensor_arrives(
    tmp_path: Path,
    seed: int,
    device_argument: str,
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...],
    *,
    own_memory: bool,
) -> None:
    model = write_model(tmp_path / "model", tensors, seed=seed, metadata={"format": "pt"})
    loaded_tensors = load_file(model.path, device_argument, framework="dlpack", own_memory=own_memory)
    assert isinstance(loaded_tensors, LoadedTensors)
    assert read_tensor_data(loaded_tensors) == model.tensor_data
    assert {name: tensor.shape for name, tensor in loaded_tensors.items()} == model.shapes
    assert {name: tensor.dtype for name, tensor in loaded_tensors.items()} == {
        name: dtype for name, dtype, _ in tensors
    }
    assert loaded_tensors.metadata == [{"format": "pt"}]
    assert (loaded_tensors.report.route, loaded_tensors.report.bytes) == (
        gds.Route.ENGINE,
        sum(map(len, model.tensor_data.values())),
    )
    assert all(tensor.address % 16 == 0 for tensor in loaded_tensors.values() if tensor.length_bytes >= 256)
    assert handles.live().get("gds.file", 0) == 0


@ON_EVERY_DEVICE
def test_several_files_are_loaded_at_once(tmp_path: Path, seed: int, device_argument: str) -> None:
    models = [
        write_model(
            tmp_path / str(index), [(f"{index}.w", "BF16", (512, 1025)), (f"{index}.b", "F32", (7,))], seed=seed
        )
        for index in range(3)
    ]
    progress_reports: list[tuple[int, int]] = []
    loaded_tensors = load_files(
        [model.path for model in models],
        device_argument,
        framework="dlpack",
        on_progress=lambda arrived_bytes, total_bytes: progress_reports.append((arrived_bytes, total_bytes)),
    )
    expected_data = {name: data for model in models for name, data in model.tensor_data.items()}
    assert read_tensor_data(loaded_tensors) == expected_data
    model_bytes = sum(map(len, expected_data.values()))
    assert progress_reports[-1] == (model_bytes, model_bytes)


SLICES = [
    pytest.param(slice(1, 3), id="rows"),
    pytest.param((slice(None), slice(2, 6)), id="columns"),
    pytest.param((..., slice(1, 2)), id="last-dimension"),
    pytest.param((0, slice(None), slice(-3, None)), id="number"),
    pytest.param((slice(1, 3), 3, slice(2, 5)), id="middle-number"),
    pytest.param((slice(2, 2),), id="empty"),
    pytest.param((-1, -1, -1), id="scalar"),
    pytest.param(..., id="everything"),
    pytest.param((), id="no-index"),
]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("index", SLICES)
def test_slice_reads_only_its_bytes(tmp_path: Path, seed: int, device_argument: str, index: object) -> None:
    shape = (4, 8, 6)
    model = write_model(tmp_path / "model", [("x", "U8", (5,)), ("w", "I16", shape), ("y", "U8", (4,))], seed=seed)
    elements = memoryview(model.tensor_data["w"]).cast("h").tolist()
    nested_lists = [[elements[(i * 8 + j) * 6 : (i * 8 + j) * 6 + 6] for j in range(8)] for i in range(4)]
    expected_elements, part_shape = slice_lists(nested_lists, shape, index)
    with safe_open(model.path, "dlpack", device_argument) as file:
        tensor_slice = file.get_slice("w")
        assert (tensor_slice.get_shape(), tensor_slice.get_dtype()) == ([4, 8, 6], "I16")
        tensor = tensor_slice[index]
    assert tensor.shape == part_shape
    assert memoryview(tensor.read()).cast("h").tolist() == expected_elements
    loaded_tensors = load_files(
        [model.path], device_argument, framework="dlpack", select=lambda name, _shape: index if name == "w" else None
    )
    assert list(loaded_tensors) == ["w"]
    assert loaded_tensors["w"].read() == tensor.read()
    assert loaded_tensors.report.bytes == tensor.length_bytes


def slice_lists(
    nested_lists: list[list[list[int]]], shape: tuple[int, ...], index: object
) -> tuple[list[int], tuple[int, ...]]:
    """Return the elements and the shape of `nested_lists[index]`, in three dimensions, by the rules of numpy."""
    index_items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if ... in index_items:
        ellipsis_index = index_items.index(...)
        index_items[ellipsis_index : ellipsis_index + 1] = [slice(None)] * (len(shape) - len(index_items) + 1)
    index_items += [slice(None)] * (len(shape) - len(index_items))
    selected_indexes = [
        range(size)[item] if isinstance(item, slice) else [range(size)[item]]
        for item, size in zip(index_items, shape, strict=True)
    ]
    part_shape = tuple(
        len(indexes) for indexes, item in zip(selected_indexes, index_items, strict=True) if isinstance(item, slice)
    )
    return [
        nested_lists[i][j][k] for i in selected_indexes[0] for j in selected_indexes[1] for k in selected_indexes[2]
    ], part_shape


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (slice(None, None, 2), "the step of a slice must be 1, not 2"),
        (8, "index 8 is not inside a dimension of size 8"),
        ((0, 0, 0), "too many items"),
        ((..., ...), "too many items"),
        ([0], "an index may contain only integers, slices and ..., not"),
        (True, "an index may contain only integers, slices and ..., not True"),
        ((0, slice(1, 3)), "begins or ends inside a byte, because F4 has 4 bits"),
        (None, "an index may contain only integers, slices and ..., not None"),
    ],
    ids=["step", "outside", "too-many", "two-ellipses", "list", "bool", "half-byte", "none"],
)
def test_invalid_slice_is_refused(tmp_path: Path, seed: int, index: object, message: str) -> None:
    model = write_model(tmp_path / "model", [("w", "F4", (8, 6))], seed=seed)
    with safe_open(model.path, "dlpack") as file, pytest.raises(UsageError, match=message):
        file.get_slice("w")[index]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("whole_file", [False, True], ids=["each", "whole-file"])
def test_open_file_has_the_interface_of_safetensors(
    tmp_path: Path, seed: int, device_argument: str, *, whole_file: bool
) -> None:
    model = write_model(tmp_path / "model", [("b", "F16", (9, 9)), ("a", "U8", ())], seed=seed, metadata={"k": "v"})
    with safe_open(model.path, framework="dlpack", device=device_argument, whole_file=whole_file) as file:
        assert (file.keys(), file.offset_keys(), file.metadata()) == (["a", "b"], ["b", "a"], {"k": "v"})
        assert file.get_tensor("b").read() == file.get_slice("b")[...].read() == model.tensor_data["b"]
        assert read_tensor_data(file.get_tensors()) == model.tensor_data
        with pytest.raises(UsageError, match="has no tensor 'c'"):
            file.get_tensor("c")
    with pytest.raises(ClosedResource):
        file.get_tensor("a")


@needs(cuda.device(count_min=2))
@pytest.mark.parametrize("share", [False, True], ids=["each-reads", "shares"])
def test_two_devices_get_all_tensors(tmp_path: Path, seed: int, *, share: bool) -> None:
    models = [write_model(tmp_path / str(index), [(f"{index}", "BF16", (700, 1025))], seed=seed) for index in range(2)]
    expected_data = {name: data for model in models for name, data in model.tensor_data.items()}
    paths = [model.path for model in models]
    loaded_tensors = load_files(paths, ["cuda:0", "cuda:1"], framework="dlpack", share=share)
    assert [read_tensor_data(tensors) for tensors in loaded_tensors] == [expected_data, expected_data]
    assert [tensor.device_index for tensors in loaded_tensors for tensor in tensors.values()] == [0, 0, 1, 1]
    total_bytes = sum(map(len, expected_data.values()))
    report = loaded_tensors[0].report
    assert (report.bytes, report.peer_bytes) == ((total_bytes, total_bytes) if share else (2 * total_bytes, 0))


@needs(cuda.device(count_min=2))
def test_each_device_loads_its_own_selection(tmp_path: Path, seed: int) -> None:
    models = [
        write_model(tmp_path / str(index), [(f"{index}.w", "U8", (6, 1001)), (f"{index}.b", "F32", (7,))], seed=seed)
        for index in range(2)
    ]
    expected_data = {name: data for model in models for name, data in model.tensor_data.items()}

    def select_rows(device_index: int, name: str, _shape: tuple[int, ...]) -> object:
        return slice(device_index * 3, device_index * 3 + 3) if name.endswith("w") else ...

    paths = [model.path for model in models]
    selections = [partial(select_rows, device_index) for device_index in range(2)]
    loaded_tensors = load_files(paths, ["cuda:0", "cuda:1"], framework="dlpack", select=selections)
    # Each device loads three of the six rows of `w`. A row has 1001 bytes.
    for device_index, tensors in enumerate(loaded_tensors):
        assert read_tensor_data(tensors) == {
            name: data[device_index * 3003 : (device_index + 1) * 3003] if name.endswith("w") else data
            for name, data in expected_data.items()
        }
        assert {tensor.device_index for tensor in tensors.values()} == {device_index}
    # Each file has 6006 bytes of `w`, which the devices divide, and 28 bytes of `b`, which both devices load.
    assert loaded_tensors[0].report.bytes == 2 * 6006 + 2 * 2 * 28
    assert loaded_tensors[0].report.peer_bytes == 0
    whole_tensors, half_tensors = load_files(
        paths, ["cuda:0", "cuda:1"], framework="dlpack", select=[None, selections[1]], own_memory=True
    )
    assert read_tensor_data(whole_tensors) == expected_data
    assert read_tensor_data(half_tensors) == read_tensor_data(loaded_tensors[1])


@needs(cuda.device(count_min=2))
def test_error_of_one_selection_ends_the_load_of_all(tmp_path: Path, seed: int) -> None:
    model = write_model(tmp_path / "model", [("a", "U8", (8 * MIB,))], seed=seed)
    handles_before = handles.live()

    def load(select: object, *, share: bool | None = None) -> None:
        load_files([model.path], ["cuda:0", "cuda:1"], framework="dlpack", select=select, share=share)

    # When the selection of the second device is evaluated, the transfer of the first device has started. The error must
    # end that transfer too.
    with pytest.raises(UsageError, match="index 9000000 is not inside a dimension of size 8388608"):
        load([None, lambda _name, _shape: 9_000_000])
    with pytest.raises(UsageError, match="select must have one function for each of the 2 devices, not 1"):
        load([None])
    with pytest.raises(UsageError, match="share must be False or None for a list of selections"):
        load([None, None], share=True)
    gds.close_engines()
    assert handles.live() == handles_before


@needs(cuda.device(count_min=2), software("cuda"))
def test_devices_share_reads_if_copies_are_faster(tmp_path: Path, seed: int) -> None:
    total_bytes = 32 * MIB
    models = [write_model(tmp_path / name, [(name, "U8", (total_bytes // 2,))], seed=seed) for name in ("a", "b")]
    expected_data = models[0].tensor_data | models[1].tensor_data

    def load_and_get_peer_bytes(access: Access = "automatic") -> int:
        paths = [model.path for model in models]
        loaded_tensors = load_files(paths, ["cuda:0", "cuda:1"], framework="dlpack", access=access)
        assert [read_tensor_data(tensors) for tensors in loaded_tensors] == [expected_data] * 2
        peer_bytes: int = loaded_tensors[0].report.peer_bytes
        return peer_bytes

    slow_copy_fault = "cuMemcpyPeerAsync call=1 delay_us=1000000"
    with inject_faults(Api.CUDA, slow_copy_fault):
        assert load_and_get_peer_bytes() == total_bytes, "shared, because no rates are known"
    assert load_and_get_peer_bytes() == 0, "not shared, because copies were slower than reads"
    with inject_faults(Api.CUDA, slow_copy_fault):
        assert load_and_get_peer_bytes("direct") == total_bytes, "shared, because the disk must be read only once"
    assert load_and_get_peer_bytes() == 0, "not shared, because both files are cached"
    drop_from_cache(models[1].path)
    with inject_faults(Api.CUDA, slow_copy_fault):
        assert load_and_get_peer_bytes() == total_bytes, "shared, because the second file is not cached"
    models[1].path.read_bytes()
    # The engine calls this function to copy the bytes of a file to a GPU, so the delay makes reads slow.
    with inject_faults(Api.CUDA, "cuMemcpyHtoDAsync_v2 call=1 delay_us=4000000"):
        assert load_and_get_peer_bytes() == 0, "not shared, because the copies of the load before were slow"
    assert load_and_get_peer_bytes() == total_bytes, "shared, because the reads of the load before were slow"


@ON_EVERY_DEVICE
def test_saved_tensors_are_loaded_again(tmp_path: Path, seed: int, device_argument: str) -> None:
    model = write_model(tmp_path / "model", TENSORS_OF_EVERY_TYPE, seed=seed)
    loaded_tensors = load_file(model.path, device_argument, framework="dlpack")
    save_file(loaded_tensors, tmp_path / "saved", {"k": "v"}, framework="dlpack", durable=True)
    reloaded_tensors = load_file(tmp_path / "saved", framework="dlpack")
    assert read_tensor_data(reloaded_tensors) == model.tensor_data
    assert reloaded_tensors.metadata == [{"k": "v"}]


@needs(host.module("numpy"))
def test_numpy_takes_a_tensor_that_outlives_its_file(tmp_path: Path, seed: int) -> None:
    import numpy as np

    model = write_model(tmp_path / "model", [("a", "F32", (4, 5)), ("b", "I64", ()), ("c", "F32", (0, 3))], seed=seed)
    arrays = {name: np.from_dlpack(tensor) for name, tensor in load_file(model.path, framework="dlpack").items()}
    assert {name: array.tobytes() for name, array in arrays.items()} == model.tensor_data
    assert {name: array.shape for name, array in arrays.items()} == model.shapes


@needs(cuda.device())
def test_memory_lives_as_long_as_a_dlpack_consumer(tmp_path: Path, seed: int, device: Device) -> None:
    length_bytes = 64 * MIB
    model = write_model(tmp_path / "model", [("a", "U8", (length_bytes,))], seed=seed)
    free_bytes_before = device.memory_info().free_bytes
    tensor = load_file(model.path, device.index, framework="dlpack")["a"]
    # The capsule stands for a library that took the memory by DLPack.
    capsule, address = tensor.__dlpack__(max_version=(1, 0)), tensor.address
    del tensor
    with borrow(device, address, length_bytes=length_bytes) as memory:
        assert memory.read() == model.tensor_data["a"]
    assert device.memory_info().free_bytes <= free_bytes_before - length_bytes
    del capsule
    gds.close_engines()
    # A real driver keeps some memory of its own after the first copies.
    assert device.memory_info().free_bytes > free_bytes_before - length_bytes // 2


@ON_EVERY_DEVICE
def test_truncated_file_is_named_in_the_error(tmp_path: Path, seed: int, device_argument: str) -> None:
    models = [write_model(tmp_path / str(index), [(f"{index}", "U8", (8 * MIB,))], seed=seed) for index in range(2)]
    handles_before = handles.live()
    paths = [model.path for model in models]
    with safe_open(models[1].path, "dlpack", device_argument) as file:
        os.truncate(models[1].path, 5 * MIB)
        with pytest.raises(gds.TransferFailed) as error_info:
            file.get_tensor("1")
    assert (error_info.value.reason, error_info.value.arguments["path"]) == (Reason.END_OF_FILE, os.fspath(paths[1]))
    with pytest.raises(UsageError, match="8388608 bytes, but 5242"):
        load_files(paths, device_argument, framework="dlpack")
    gds.close_engines()
    assert handles.live() == handles_before


@ON_EVERY_DEVICE
def test_file_without_tensors_is_loaded(tmp_path: Path, device_argument: str) -> None:
    (tmp_path / "model").write_bytes(pack_file({"__metadata__": {"k": "v"}}))
    loaded_tensors = load_file(tmp_path / "model", device_argument, framework="dlpack")
    assert (loaded_tensors, loaded_tensors.metadata, loaded_tensors.report.bytes) == ({}, [{"k": "v"}], 0)


def test_tensor_in_two_files_is_refused(tmp_path: Path, seed: int) -> None:
    models = [write_model(tmp_path / str(index), [("a", "U8", (4,))], seed=seed) for index in range(2)]
    with pytest.raises(UsageError, match=f"tensor 'a' is in {tmp_path}/0 and in {tmp_path}/1"):
        load_files([model.path for model in models], framework="dlpack")


@pytest.mark.parametrize("device_argument", ["cuda:x", "tpu", "", -1, []], ids=str)
def test_unknown_device_is_refused(tmp_path: Path, seed: int, device_argument: object) -> None:
    model = write_model(tmp_path / "model", [("a", "U8", (4,))], seed=seed)
    with pytest.raises(UsageError, match="device must"):
        load_file(model.path, device_argument, framework="dlpack")


def test_errors_name_the_file_and_leave_nothing_open(tmp_path: Path, seed: int) -> None:
    model: ModelFile = write_model(tmp_path / "model", [("a", "U8", (4,))], seed=seed)
    (tmp_path / "bad").write_bytes(pack_file({"a": {}}))
    handles_before = handles.live()
    with pytest.raises(FileNotFoundError, match="absent"):
        load_files([model.path, tmp_path / "absent"], framework="dlpack")
    with pytest.raises(UsageError, match="bad is not a valid safetensors file"):
        load_files([model.path, tmp_path / "bad"], framework="dlpack")
    with pytest.raises(UsageError, match="framework must be 'pt' or 'dlpack', not 'tf'"):
        load_file(model.path, framework="tf")
    with pytest.raises(UsageError, match="at least one file"):
        load_files([], framework="dlpack")
    assert handles.live() == handles_before


@needs(cuda.device())
def test_model_larger_than_the_device_is_out_of_memory(tmp_path: Path, seed: int, device: Device) -> None:
    handles_before = handles.live()
    small_model = write_model(tmp_path / "small", [("b", "U8", (32 * MIB,))], seed=seed)
    free_bytes = device.memory_info().free_bytes
    with (tmp_path / "model").open("wb") as file:
        file.write(pack_file({"a": {"dtype": "U8", "shape": [free_bytes * 2], "data_offsets": [0, free_bytes * 2]}}))
        file.truncate(file.tell() + free_bytes * 2)
    with pytest.raises(ApiError) as error_info:
        load_files([small_model.path, tmp_path / "model"], device.index, framework="dlpack")
    assert error_info.value.reason is Reason.OUT_OF_MEMORY
    assert device.memory_info().free_bytes == free_bytes
    # The process keeps the primary context of the device, so the number of open contexts may have changed.
    assert handles.live() == handles_before | {"cuda.primary_context": handles.live().get("cuda.primary_context", 0)}


@ON_EVERY_DEVICE
def test_cancelled_load_frees_everything(tmp_path: Path, seed: int, device_argument: str) -> None:
    model = write_model(tmp_path / "model", [("a", "U8", (32 * MIB,))], seed=seed)
    failure_reasons = []
    with start_load_files([model.path], device_argument, framework="dlpack") as load:
        load.cancel()
        try:
            load.result()
        except gds.TransferFailed as error:
            failure_reasons.append(error.reason)
    # If all chunks were started before the cancellation, the load may succeed.
    assert failure_reasons in ([], [Reason.CANCELLED])
    assert handles.live().get("gds.file", 0) == 0

    def interrupt_load(*_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_file(model.path, device_argument, framework="dlpack", on_progress=interrupt_load)
    assert handles.live().get("gds.file", 0) == 0


@ON_EVERY_DEVICE
def test_leaving_the_with_block_cancels_the_load(tmp_path: Path, seed: int, device_argument: str) -> None:
    model = write_model(tmp_path / "model", [("a", "U8", (4 * MIB,))], seed=seed)
    with start_load_files([model.path], device_argument, framework="dlpack") as load:
        assert load.length_bytes == 4 * MIB
    with pytest.raises(ClosedResource):
        load.result()


def test_host_buffer_reads_a_range() -> None:
    buffer = TensorBuffer(gds.HOST, 100)
    assert buffer.read(90, 10) == bytes(10)
