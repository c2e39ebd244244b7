"""ctypes binding of the C API of usrbio, for cases with arguments that the Python API never passes."""

from __future__ import annotations

import ctypes

from gdrkit.usrbio._library import library_path

__all__ = ["Ior", "Iov", "load_client_library"]


class Iov(ctypes.Structure):
    """struct hf3fs_iov."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("iovh", ctypes.c_void_p),
        ("id", ctypes.c_char * 16),
        ("mount_point", ctypes.c_char * 256),
        ("size", ctypes.c_size_t),
        ("block_size", ctypes.c_size_t),
        ("numa", ctypes.c_int),
    )


class Ior(ctypes.Structure):
    """struct hf3fs_ior."""

    _fields_ = (
        ("iov", Iov),
        ("iorh", ctypes.c_void_p),
        ("mount_point", ctypes.c_char * 256),
        ("for_read", ctypes.c_bool),
        ("io_depth", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("timeout", ctypes.c_int),
        ("flags", ctypes.c_uint64),
    )


_ARGUMENT_TYPES = {
    # iov, mount point, size, block size, NUMA node
    "hf3fs_iovcreate": (ctypes.POINTER(Iov), ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int),
    "hf3fs_iovdestroy": (ctypes.POINTER(Iov),),
    # ring, mount point, entries, for_read, io_depth, timeout, NUMA node, flags
    "hf3fs_iorcreate4": (
        ctypes.POINTER(Ior),
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_bool,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_uint64,
    ),
    "hf3fs_iordestroy": (ctypes.POINTER(Ior),),
    # ring, iov, read, pointer, descriptor, offset in the file, length, userdata
    "hf3fs_prep_io": (
        ctypes.POINTER(Ior),
        ctypes.POINTER(Iov),
        ctypes.c_bool,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_size_t,
        ctypes.c_uint64,
        ctypes.c_void_p,
    ),
}


def load_client_library() -> ctypes.CDLL:
    """Return the native client library, the same file that gdrkit.usrbio opens."""
    library = ctypes.CDLL(str(library_path()))
    for function_name, argument_types in _ARGUMENT_TYPES.items():
        getattr(library, function_name).argtypes = argument_types
    return library
