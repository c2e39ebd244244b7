"""Loaders of model files for the benchmarks: `gdrkit.safetensors`, and the other packages with which it is compared.

A loader is a function that loads the files into GPU memory and returns torch tensors by name. Each loader uses the
fastest settings that its package documents.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from gdrkit import gds, safetensors
from gdrkit.safetensors.header import read_header
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["list_loaders"]

_TORCH_DEVICE = "cuda:0"
_THREADS_COUNT = 16


def list_loaders() -> dict[str, Callable[[Sequence[Path]], dict[str, Any]]]:
    """Return two loaders of gdrkit, then one loader of each other package that is installed, by name."""
    other_loaders: dict[str, Callable[[Sequence[Path]], dict[str, Any]]] = {
        "safetensors": _load_by_safetensors,
        "fastsafetensors": _load_by_fastsafetensors,
        "runai_model_streamer": _load_by_runai,
        "instanttensor": _load_by_instanttensor,
        "kvikio": _load_by_kvikio,
    }
    installed_loaders = {
        name: load for name, load in other_loaders.items() if importlib.util.find_spec(name) is not None
    }
    return {"gdrkit": _load_by_gdrkit, "gdrkit_per_tensor": _load_by_gdrkit_per_tensor, **installed_loaders}


def _load_by_gdrkit(paths: Sequence[Path]) -> safetensors.LoadedTensors:
    tensors: safetensors.LoadedTensors = safetensors.load_files(paths, _TORCH_DEVICE)
    return tensors


def _load_by_gdrkit_per_tensor(paths: Sequence[Path]) -> safetensors.LoadedTensors:
    """Load each tensor into memory of its own. By default, the tensors of a file share one allocation."""
    tensors: safetensors.LoadedTensors = safetensors.load_files(paths, _TORCH_DEVICE, own_memory=True)
    return tensors


def _load_by_safetensors(paths: Sequence[Path]) -> dict[str, Any]:
    load_file = importlib.import_module("safetensors.torch").load_file
    tensors: dict[str, Any] = {}
    for path in paths:
        tensors.update(load_file(path, device=_TORCH_DEVICE))
    return tensors


def _load_by_fastsafetensors(paths: Sequence[Path]) -> dict[str, Any]:
    fastsafetensors, torch = importlib.import_module("fastsafetensors"), importlib.import_module("torch")
    loader = fastsafetensors.SafeTensorsFileLoader(
        fastsafetensors.SingleGroup(), torch.device(_TORCH_DEVICE), max_threads=_THREADS_COUNT, nogds=True
    )
    try:
        loader.add_filenames({0: [str(path) for path in paths]})
        buffer = loader.copy_files_to_device()
        # The tensors are views of memory that lives as long as the buffer.
        return _TensorsWithOwner(buffer, {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx})
    finally:
        loader.close()


class _TensorsWithOwner(dict[str, Any]):
    """Tensors by name, with the object of another library that owns their memory."""

    def __init__(self, owner: Any, tensors: dict[str, Any]) -> None:  # noqa: ANN401 - an object of another library.
        super().__init__(tensors)
        self._owner = owner

    def clear(self) -> None:
        """Drop the tensors, and free their memory."""
        super().clear()
        self._owner.close()


def _load_by_runai(paths: Sequence[Path]) -> dict[str, Any]:
    os.environ.setdefault("RUNAI_STREAMER_CONCURRENCY", str(_THREADS_COUNT))
    runai_model_streamer = importlib.import_module("runai_model_streamer")
    with runai_model_streamer.SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in paths])
        return {name: tensor.to(_TORCH_DEVICE) for name, tensor in streamer.get_tensors()}


def _load_by_instanttensor(paths: Sequence[Path]) -> dict[str, Any]:
    instanttensor = importlib.import_module("instanttensor")
    with instanttensor.safe_open([str(path) for path in paths], framework="pt", device=0) as file:
        return {name: tensor.clone() for name, tensor in file.tensors()}


def _load_by_kvikio(paths: Sequence[Path]) -> dict[str, Any]:
    """Read whole files with kvikio, which does not know the format, and create the tensors as views of the bytes."""
    kvikio, torch = importlib.import_module("kvikio"), importlib.import_module("torch")
    importlib.import_module("kvikio.defaults").set(
        {"compat_mode": kvikio.CompatMode.ON, "num_threads": _THREADS_COUNT, "task_size": 4 * MIB}
    )
    tensors: dict[str, Any] = {}
    files_and_futures = []
    for path in paths:
        with gds.File(path, direct="never") as gds_file:
            header = read_header(gds_file)
        buffer = torch.empty(header.data_bytes, dtype=torch.uint8, device=_TORCH_DEVICE)
        torch.cuda.current_stream().synchronize()
        file = kvikio.CuFile(str(path))
        files_and_futures.append((file, file.pread(buffer, file_offset=header.data_offset_bytes)))
        for name, entry in header.tensors.items():
            dtype = getattr(torch, safetensors.ELEMENT_TYPES[entry.dtype].torch_name)
            tensors[name] = buffer[entry.begin : entry.end].view(dtype).view(entry.shape)
    for file, future in files_and_futures:
        future.get()
        file.close()
    return tensors
