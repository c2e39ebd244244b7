"""Calls of libibverbs through ctypes, because pyverbs destroys the dependent objects of an object before the object."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["CtypesVerbs"]

_RELIABLE_CONNECTED = 2  # IBV_QPT_RC
_LOCAL_WRITE = 1  # IBV_ACCESS_LOCAL_WRITE
_MEMORY_BYTES = 4096


class _Capacity(ctypes.Structure):
    """``struct ibv_qp_cap``."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")
    )


class _QueuePairAttributes(ctypes.Structure):
    """``struct ibv_qp_init_attr``."""

    _fields_ = (
        ("qp_context", ctypes.c_void_p),
        ("send_cq", ctypes.c_void_p),
        ("recv_cq", ctypes.c_void_p),
        ("srq", ctypes.c_void_p),
        ("cap", _Capacity),
        ("qp_type", ctypes.c_int),
        ("sq_sig_all", ctypes.c_int),
    )


class CtypesVerbs:
    """An open device. Methods that create an object return its address. Other methods return 0 or an errno."""

    def __init__(self, nic_name: str) -> None:
        self._library = library = ctypes.CDLL("libibverbs.so.1", use_errno=True)
        pointer_type = ctypes.c_void_p
        for function in ("open_device", "alloc_pd", "create_cq", "create_comp_channel", "create_qp", "reg_mr"):
            getattr(library, f"ibv_{function}").restype = pointer_type
        library.ibv_get_device_list.restype = ctypes.POINTER(pointer_type)
        library.ibv_get_device_name.restype = ctypes.c_char_p
        device_count = ctypes.c_int()
        devices = library.ibv_get_device_list(ctypes.byref(device_count))
        device_by_name = {
            library.ibv_get_device_name(pointer_type(device)): device for device in devices[: device_count.value]
        }
        self._context = self._require_pointer(library.ibv_open_device(pointer_type(device_by_name[nic_name.encode()])))
        library.ibv_free_device_list(devices)
        self._memory = ctypes.create_string_buffer(_MEMORY_BYTES)

    def allocate_domain(self) -> ctypes.c_void_p:
        """Call ibv_alloc_pd."""
        return self._require_pointer(self._library.ibv_alloc_pd(self._context))

    def create_completion_channel(self) -> ctypes.c_void_p:
        """Call ibv_create_comp_channel."""
        return self._require_pointer(self._library.ibv_create_comp_channel(self._context))

    def create_completion_queue(self, channel: ctypes.c_void_p | None = None) -> ctypes.c_void_p:
        """Call ibv_create_cq."""
        # The arguments are a depth of 16 completions, no user context, the channel, and completion vector 0.
        return self._require_pointer(self._library.ibv_create_cq(self._context, 16, None, channel, 0))

    def create_queue_pair(self, domain: ctypes.c_void_p, completion_queue: ctypes.c_void_p) -> ctypes.c_void_p:
        """Call ibv_create_qp."""
        attributes = _QueuePairAttributes(
            send_cq=completion_queue,
            recv_cq=completion_queue,
            cap=_Capacity(4, 4, 1, 1, 0),
            qp_type=_RELIABLE_CONNECTED,
        )
        return self._require_pointer(self._library.ibv_create_qp(domain, ctypes.byref(attributes)))

    def register(self, domain: ctypes.c_void_p) -> ctypes.c_void_p:
        """Call ibv_reg_mr."""
        length_bytes = ctypes.c_size_t(_MEMORY_BYTES)
        return self._require_pointer(self._library.ibv_reg_mr(domain, self._memory, length_bytes, _LOCAL_WRITE))

    def deallocate_domain(self, domain: ctypes.c_void_p) -> int:
        """Call ibv_dealloc_pd."""
        return int(self._library.ibv_dealloc_pd(domain))

    def deregister(self, region: ctypes.c_void_p) -> int:
        """Call ibv_dereg_mr."""
        return int(self._library.ibv_dereg_mr(region))

    def destroy_queue_pair(self, queue_pair: ctypes.c_void_p) -> int:
        """Call ibv_destroy_qp."""
        return int(self._library.ibv_destroy_qp(queue_pair))

    def destroy_completion_queue(self, completion_queue: ctypes.c_void_p) -> int:
        """Call ibv_destroy_cq."""
        return int(self._library.ibv_destroy_cq(completion_queue))

    def destroy_completion_channel(self, channel: ctypes.c_void_p) -> int:
        """Call ibv_destroy_comp_channel."""
        return int(self._library.ibv_destroy_comp_channel(channel))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._library.ibv_close_device(self._context) == 0

    @staticmethod
    def _require_pointer(address: int | None) -> ctypes.c_void_p:
        """Return the address as a pointer, and fail the case if it is NULL."""
        assert address, f"errno {ctypes.get_errno()}"
        return ctypes.c_void_p(address)
