"""Replacement of the functions by which other programs, such as transformers, load model files."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

from gdrkit.errors import Reason, UsageError
from gdrkit.safetensors._torch import find_functions_to_replace
from gdrkit.safetensors.loading import load_file
from gdrkit.safetensors.opening import safe_open

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["patch"]

_patch_lock = threading.Lock()  # It is held while a block of patch() is active.


@contextlib.contextmanager
def patch(device: Any = None) -> Iterator[None]:  # noqa: ANN401 - every form in which torch names a device.
    """Make all modules that load files by safetensors use gdrkit inside the block.

    ``safe_open`` and ``load_file`` of safetensors are replaced in every module that has imported them, such as
    ``transformers.modeling_utils``, and are restored at the end. The replacement affects all threads.

    Parameters
    ----------
    device : str, int, torch.device or None
        The device that gets the tensors, whatever device the caller names. transformers opens its files for the CPU and
        moves each tensor afterwards. If `device` is the device of the model, the tensors are loaded there directly.
        None: the device that the caller names.

    Raises
    ------
    SetupMissing
        safetensors or torch is not installed.
    UsageError
        BUSY: another block is active.
    """
    original_functions = find_functions_to_replace()
    replacements = {"safe_open": _make_open_class(device), "load_file": _make_load_function(device)}
    if not _patch_lock.acquire(blocking=False):
        message = "the functions of safetensors are already replaced, by another block of patch()"
        raise UsageError(message, reason=Reason.BUSY)
    try:
        _replace(original_functions, replacements)
        try:
            yield
        finally:
            # A module that was imported inside the block has a replacement too.
            _replace(replacements, original_functions)
    finally:
        _patch_lock.release()


def _make_open_class(device: Any) -> type[safe_open]:  # noqa: ANN401 - see patch.
    class PatchedOpen(safe_open):
        """:class:`safe_open` for one device, which loads a file at the first access to a whole tensor."""

        # A caller may pass the device by position or as the keyword `device`. The parameter cannot have the name
        # `device`, which is the argument of patch() here. So the keyword is taken from `options`.
        def __init__(self, filename: Any, framework: str = "pt", named_device: Any = "cpu", **options: Any) -> None:  # noqa: ANN401
            device_name = options.pop("device", named_device)
            super().__init__(filename, framework, device_name if device is None else device, whole_file=True, **options)

    return PatchedOpen


def _make_load_function(device: Any) -> Any:  # noqa: ANN401 - see patch.
    @functools.wraps(load_file)
    def load(filename: Any, named_device: Any = "cpu", **options: Any) -> Any:  # noqa: ANN401
        options.pop("backend", None)  # gdrkit has no choice of backends.
        device_name = options.pop("device", named_device)
        return load_file(filename, device_name if device is None else device, framework="pt", **options)

    return load


def _replace(old_objects: Mapping[str, Any], new_objects: Mapping[str, Any]) -> None:
    """Replace each object of `old_objects` by the object of the same key in `new_objects`, in all imported modules.

    A module may have imported the objects under other names, so they are recognized by their identity.
    """
    name_by_id = {id(value): name for name, value in old_objects.items()}
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", {})
        for attribute, value in list(namespace.items()):
            if id(value) in name_by_id:
                namespace[attribute] = new_objects[name_by_id[id(value)]]
