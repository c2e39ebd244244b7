"""Model files: loads into a GPU, slices, several devices, progress, cancellation, and a file from GPU memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gdrkit import cuda, gds, safetensors

ROWS, COLUMNS = 64, 128

with tempfile.TemporaryDirectory() as folder_name:
    folder = Path(folder_name)
    # A safetensors file has the length of its header (8 bytes), the header (JSON) and the data. A BF16 value has 2
    # bytes.
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

    # framework="dlpack" works without torch. Its tensors can be passed to every library that supports DLPack.
    tensors: safetensors.LoadedTensors = safetensors.load_files(paths, "cuda:0", framework="dlpack")
    tensor: safetensors.ModelTensor = tensors["w1"]
    assert tensor.read() == weights
    print(tensors.report.bytes, "bytes by", tensors.report.route.value)

    # `select` returns the rows to read: here the first half, which the first of two ranks needs.
    first_half = safetensors.load_file(
        paths[0], "cuda:0", framework="dlpack", select=lambda _name, shape: slice(shape[0] // 2)
    )
    assert first_half["w0"].read() == weights[: len(weights) // 2]

    # get_slice() gives access to one tensor of an open file. Here its first column is read.
    with safetensors.safe_open(paths[0], framework="dlpack", device="cuda:0") as file:
        tensor_slice: safetensors.TensorSlice = file.get_slice("w0")
        print(file.keys(), tensor_slice.get_shape(), tensor_slice.get_dtype(), tensor_slice[:, :1].shape)

    # Each of two devices with peer access reads half of the bytes from the files, and copies the rest from its peer.
    if cuda.device_count() > 1:
        tensors_by_device = safetensors.load_files(paths, ["cuda:0", "cuda:1"], framework="dlpack")
        print(
            [device_tensors["w0"].device_index for device_tensors in tensors_by_device],
            tensors_by_device[0].report.peer_bytes,
            "bytes from the peer",
        )

    # start_load_files() returns a future. At the end of the block, a load that still runs is cancelled.
    with safetensors.start_load_files(paths, "cpu", framework="dlpack") as pending_load:
        pending_load.cancel()
        print(pending_load.bytes_moved, "of", pending_load.length_bytes, "bytes")

    # save_file() writes GPU memory to a file. The file gets its name only when all its bytes are written.
    safetensors.save_file(tensors, folder / "saved.safetensors", {"origin": "example"}, framework="dlpack")
    saved_tensors = safetensors.load_file(folder / "saved.safetensors", framework="dlpack")
    assert saved_tensors["w0"].read() == weights
    gds.close_engines()
