"""Loading and saving of model files in the safetensors format, by the copy engine of :mod:`gdrkit.gds`.

Start with :func:`load_file`. ``docs/models.md`` is the guide. ``_torch.py`` is the only file that imports torch.
"""

from __future__ import annotations

from gdrkit.safetensors.devices import LoadedTensors, LoadReport
from gdrkit.safetensors.header import ELEMENT_TYPES, ElementType, Header, TensorEntry
from gdrkit.safetensors.loading import ModelLoad, load_file, load_files, start_load_files
from gdrkit.safetensors.opening import TensorSlice, safe_open
from gdrkit.safetensors.patching import patch
from gdrkit.safetensors.saving import save_file
from gdrkit.safetensors.tensors import ModelTensor

__all__ = [
    "ELEMENT_TYPES",
    "ElementType",
    "Header",
    "LoadReport",
    "LoadedTensors",
    "ModelLoad",
    "ModelTensor",
    "TensorEntry",
    "TensorSlice",
    "load_file",
    "load_files",
    "patch",
    "safe_open",
    "save_file",
    "start_load_files",
]
