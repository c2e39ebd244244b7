"""Import and export of DLPack tensors: the structures of ``dlpack.h`` in ctypes.

Both structures are supported: ``DLManagedTensor``, and ``DLManagedTensorVersioned`` of version 1. As the standard
requires, a consumed capsule is renamed, and its deleter is called exactly once. Sources: dlpack.h, and "Python
Specification for DLPack" of the array API standard.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdrkit.errors import Reason, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BYTE_ELEMENT_TYPE", "CPU", "CUDA", "CUDA_HOST", "CUDA_MANAGED", "ConsumedTensor", "consume", "export"]

CPU = 1  # kDLCPU
CUDA = 2  # kDLCUDA
CUDA_HOST = 3  # kDLCUDAHost
CUDA_MANAGED = 13  # kDLCUDAManaged

# The DLDataType of bytes: type code (kDLUInt), bits of an element, lanes (elements of a vector type).
BYTE_ELEMENT_TYPE = (1, 8, 1)
_READ_ONLY_FLAG = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


# The layouts of DLTensor, DLManagedTensor and DLManagedTensorVersioned. The fields device_type and device_id are the
# DLDevice, and the fields code, bits and lanes are the DLDataType.
class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# The C type of deleters and of capsule destructors: a function that gets one address.
_AddressFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DlTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _VersionedTensor(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DlTensor),
    )


_STRUCTURE_BY_CAPSULE_NAME: dict[bytes, Any] = {b"dltensor": _ManagedTensor, b"dltensor_versioned": _VersionedTensor}

_python_api = ctypes.pythonapi
_is_valid_capsule = _python_api.PyCapsule_IsValid
_is_valid_capsule.restype, _is_valid_capsule.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_get_capsule_pointer = _python_api.PyCapsule_GetPointer
_get_capsule_pointer.restype, _get_capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_rename_capsule = _python_api.PyCapsule_SetName
_rename_capsule.restype, _rename_capsule.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_new_capsule = _python_api.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

# A capsule has only a pointer to its name, so these names live as long as this module.
_CONSUMED_NAMES = {name: ctypes.create_string_buffer(b"used_" + name) for name in _STRUCTURE_BY_CAPSULE_NAME}
_CAPSULE_NAMES = {name: ctypes.create_string_buffer(name) for name in _STRUCTURE_BY_CAPSULE_NAME}


@dataclass(frozen=True, slots=True)
class ConsumedTensor:
    """The tensor of a consumed capsule. The consumer must call ``release`` when it no longer uses the tensor."""

    address: int
    device_type: int
    device_index: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    item_bits: int
    read_only: bool
    release: Callable[[], None]


def consume(capsule: Any) -> ConsumedTensor:
    """Consume a capsule and return its tensor.

    Raises
    ------
    UsageError
        MALFORMED: `capsule` is not a DLPack capsule, was consumed before, or has an unknown version.
    """
    capsule_name = next(
        (capsule_name for capsule_name in _STRUCTURE_BY_CAPSULE_NAME if _is_valid_capsule(capsule, capsule_name)), None
    )
    if capsule_name is None:
        message = f"{type(capsule).__name__} is not a DLPack capsule, or the capsule was consumed before"
        raise UsageError(message, reason=Reason.MALFORMED)
    address = _get_capsule_pointer(capsule, capsule_name)
    managed_tensor = _STRUCTURE_BY_CAPSULE_NAME[capsule_name].from_address(address)
    if capsule_name == b"dltensor_versioned" and managed_tensor.major != 1:
        # The capsule is not consumed. It still belongs to its producer, whose destructor deletes it.
        message = f"the version of DLPack must be 1, not {managed_tensor.major}.{managed_tensor.minor}"
        raise UsageError(message, reason=Reason.MALFORMED)
    _rename_capsule(capsule, _CONSUMED_NAMES[capsule_name])
    tensor, dimension_count = managed_tensor.tensor, managed_tensor.tensor.ndim
    release_call_counter = itertools.count()

    def release() -> None:
        # next() is atomic, so only the first call of several threads calls the deleter.
        if next(release_call_counter) == 0 and managed_tensor.deleter:
            _AddressFunction(managed_tensor.deleter)(address)

    return ConsumedTensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        device_type=tensor.device_type,
        device_index=tensor.device_id,
        shape=tuple(tensor.shape[:dimension_count]),
        strides=tuple(tensor.strides[:dimension_count]) if tensor.strides else None,
        item_bits=tensor.bits * tensor.lanes,
        read_only=bool(capsule_name == b"dltensor_versioned" and managed_tensor.flags & _READ_ONLY_FLAG),
        release=release,
    )


# The exported tensors by the address of their structure: the structure, its shape, and the function to call when the
# consumer releases the tensor. The entry keeps the structure and the shape alive until then.
_exported_tensors: dict[int, tuple[Any, Any, Callable[[], None]]] = {}


def _delete_export(address: int) -> None:
    _managed_tensor, _shape, on_release = _exported_tensors.pop(address)
    on_release()


def _destroy_capsule(capsule_address: int) -> None:
    # An object in destruction must not get new references. So this function gets the address of the capsule, and calls
    # the C API with addresses. A consumed capsule has another name, so nothing is deleted for it.
    is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _python_api))
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", _python_api)
    )
    for capsule_name in _STRUCTURE_BY_CAPSULE_NAME:
        if is_valid(capsule_address, capsule_name):
            _delete_export(get_pointer(capsule_address, capsule_name))


# Callbacks for C code. They live as long as this module.
_DELETER, _CAPSULE_DESTRUCTOR = _AddressFunction(_delete_export), _AddressFunction(_destroy_capsule)


def export(
    address: int,
    *,
    shape: Sequence[int],
    device: tuple[int, int],
    is_versioned: bool,
    on_release: Callable[[], None],
    element_type: tuple[int, int, int] = BYTE_ELEMENT_TYPE,
) -> Any:
    """Return a capsule for a contiguous tensor.

    Parameters
    ----------
    address : int
        Address of the first element.
    shape : sequence of int
        Number of elements in each dimension.
    device : tuple of int
        DLPack's type and index of the device.
    is_versioned : bool
        Whether the capsule has a ``DLManagedTensorVersioned``.
    on_release : callable
        Called when the consumer releases the tensor, or when the capsule is deleted without a consumer.
    element_type : tuple of int
        Type code, bits and lanes of an element.
    """
    capsule_name = b"dltensor_versioned" if is_versioned else b"dltensor"
    managed_tensor = _STRUCTURE_BY_CAPSULE_NAME[capsule_name]()
    shape_array = (ctypes.c_int64 * len(shape))(*shape)
    shape_pointer = ctypes.cast(shape_array, ctypes.POINTER(ctypes.c_int64))
    managed_tensor.tensor = _DlTensor(address, *device, len(shape), *element_type, shape_pointer, None, 0)
    managed_tensor.deleter = ctypes.cast(_DELETER, ctypes.c_void_p)
    if is_versioned:
        managed_tensor.major, managed_tensor.minor = 1, 0
    structure_address = ctypes.addressof(managed_tensor)
    _exported_tensors[structure_address] = (managed_tensor, shape_array, on_release)
    return _new_capsule(
        structure_address,
        ctypes.cast(_CAPSULE_NAMES[capsule_name], ctypes.c_char_p),
        ctypes.cast(_CAPSULE_DESTRUCTOR, ctypes.c_void_p),
    )
