"""Model files: loads into a GPU, slices, several devices, progress, cancellation, and a file from GPU memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gdrkit import cuda, gds, safetensors

ROWS, COLUMNS = 64, 128

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    weights = os.urandom(ROWS * COLUMNS * 2)
    for index in range(2):
        header = b'{"w%d":{"dtype":"BF16","shape":[%d,%d],"data_offsets":[0,%d]}}' % (
            index,
            ROWS,
            COLUMNS,
            len(weights),
        )
        (folder / f"{index}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    paths = [folder / "0.safetensors", folder / "1.safetensors"]

    # The tensors of torch, or of framework="dlpack" for every other library.
    tensors: safetensors.LoadedTensors = safetensors.load_files(paths, "cuda:0", framework="dlpack")
    tensor: safetensors.ModelTensor = tensors["w1"]
    assert tensor.read() == weights
    print(tensors.report.bytes, "bytes by", tensors.report.route.value)

    # The rows that the first of two ranks needs. The other bytes are not read.
    first_half = safetensors.load_file(
        paths[0], "cuda:0", framework="dlpack", select=lambda _name, shape: slice(shape[0] // 2)
    )
    assert first_half["w0"].read() == weights[: len(weights) // 2]

    # One tensor of an open file, and columns of this tensor.
    with safetensors.safe_open(paths[0], framework="dlpack", device="cuda:0") as file:
        tensor_slice: safetensors.TensorSlice = file.get_slice("w0")
        print(file.keys(), tensor_slice.get_shape(), tensor_slice.get_dtype(), tensor_slice[:, :1].shape)

    # Two devices with peer access read half of the bytes each.
    if cuda.device_count() > 1:
        tensors_by_device = safetensors.load_files(paths, ["cuda:0", "cuda:1"], framework="dlpack")
        print(
            [loaded["w0"].device_index for loaded in tensors_by_device],
            tensors_by_device[0].report.peer_bytes,
            "bytes from the peer",
        )

    # A load that was started is a future, and the end of its block cancels it.
    with safetensors.start_load_files(paths, "cpu", framework="dlpack") as load:
        load.cancel()
        print(load.bytes_moved, "of", load.length_bytes, "bytes")

    # save_file() writes GPU memory to a file, which gets its name when all its bytes are written.
    safetensors.save_file(tensors, folder / "saved.safetensors", {"origin": "example"}, framework="dlpack")
    saved_tensors = safetensors.load_file(folder / "saved.safetensors", framework="dlpack")
    assert saved_tensors["w0"].read() == weights
    gds.close_engines()
