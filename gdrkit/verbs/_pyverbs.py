"""Calls of libibverbs, by ``pyverbs`` and, where pyverbs lacks a call, by ctypes. No other file uses pyverbs.

The first call loads pyverbs and libibverbs. The module supports unmodified pyverbs from 44 (Debian 12) to 59 (PyPI) and
newer. All differences between these versions are handled here. pyverbs holds the GIL in every call, so no call of this
module may block; :func:`take_event` states the only exception. Untyped values of pyverbs do not leave this package.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import importlib.util
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gdrkit import forks, loader
from gdrkit.errors import ApiError, SetupMissing
from gdrkit.remedies import system_install
from gdrkit.verbs import _errors, _layout
from gdrkit.verbs._structures import DeviceEntry, GidEntry, NativeRegion, PortAttributes, WorkCompletion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "allocate_domain",
    "call",
    "close",
    "create_channel",
    "create_completion_queue",
    "create_queue_pair",
    "domain_pointer",
    "event_fd",
    "export_host_buffer",
    "exposes_domain_pointers",
    "list_devices",
    "modify_queue_pair",
    "open_device",
    "poll_completions",
    "post_receive",
    "post_send",
    "probe_dmabuf",
    "query_gids",
    "query_ports",
    "query_queue_pair_state",
    "register_address",
    "register_dmabuf",
    "request_notification",
    "take_event",
]

_LIBRARY_SONAME = "libibverbs.so.1"
_IMPORT_OPERATION = "import pyverbs"
_SYSTEM_PACKAGES_FOLDER = "/usr/lib/python3/dist-packages"
_MODULE_NAMES = ("addr", "cq", "device", "mr", "pd", "pyverbs_error", "qp", "wr")

_QPT_RC = 2  # IBV_QPT_RC
_QP_STATE = 1  # IBV_QP_STATE
_WC_WITH_IMM = 1 << 1  # IBV_WC_WITH_IMM
_NO_ERRNO = -1  # The error_code of a PyverbsError if pyverbs did not keep the errno.

# pyverbs 44 refuses a request without a scatter/gather element. An empty element has the same meaning.
_EMPTY_ELEMENTS = ((0, 0, 0),)


class _OpenObjects:
    """The objects of libibverbs that this process created and did not close, by their Python id.

    In a forked child the set is empty. The inherited objects belong to the parent, so :func:`close` ignores them.
    """

    def __init__(self) -> None:
        self.ids: set[int] = set()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Forget the objects of the parent, which stay as they are."""
        self.ids.clear()


_open_objects = _OpenObjects()
_domain_pointers: dict[int, int] = {}  # The ibv_pd * of the open protection domains, by the Python id of the domain.


def _load_modules() -> Any:
    """Return the modules of pyverbs, or raise SetupMissing if they or their libraries are missing or do not fit."""
    modules_or_error = _import_modules()
    if isinstance(modules_or_error, SetupMissing):
        raise modules_or_error.clone()
    return modules_or_error


def _make_install_advice() -> str:
    # The advice is not `pip install pyverbs`, because this builds pyverbs with the newest Cython, and the build fails.
    return (
        f"{system_install('python3-pyverbs')}; for another Python than the system's, install the wheel of pyverbs that "
        "`nox -s wheels` builds in a checkout"
    )


@functools.cache
def _import_modules() -> Any:
    """Import pyverbs. Return a namespace of its modules, or the SetupMissing error if the import failed."""
    for soname in (_LIBRARY_SONAME, "librdmacm.so.1"):
        loader.check_library(soname, operation=f"dlopen {soname}")
    try:
        loader.import_package(
            "pyverbs", extension="device", folder=_SYSTEM_PACKAGES_FOLDER, what_to_do=_make_install_advice()
        )
        with loader.preserve_root_logger():
            return SimpleNamespace(**{name: importlib.import_module(f"pyverbs.{name}") for name in _MODULE_NAMES})
    except ImportError as error:
        # This failure is cached, because importing a half-imported pyverbs again would fail with another error, which
        # hides the first one. The ImportError itself is not kept, because its traceback would keep the variables of all
        # callers alive.
        return loader.setup_missing(
            operation=_IMPORT_OPERATION, text=str(error), what_to_do=_make_install_advice(), default_errno=errno.ENOENT
        )


@functools.cache
def exposes_domain_pointers() -> bool:
    """Return whether ``PD.pd`` is an address (pyverbs 59 and newer).

    In older versions, reading ``PD.pd`` crashes the interpreter, so this function must not read it. pyverbs has no
    version number, but the release that fixed ``PD.pd`` also removed the module ``pyverbs.enums``.
    """
    _load_modules()
    return importlib.util.find_spec("pyverbs.enums") is None


def domain_pointer(domain: object) -> int | None:
    """Return the ``ibv_pd *`` of a protection domain.

    If the pointer is not known, the result is None, and pyverbs must do the registration itself.
    """
    return _domain_pointers.get(id(domain))


def call(
    operation: str,
    function: Callable[..., Any],
    *function_arguments: Any,
    arguments: Mapping[str, object] | None = None,
    pinned_bytes: int = 0,
) -> Any:
    """Call a function of pyverbs, and raise its exceptions as errors of gdrkit, with the errno if pyverbs kept it.

    The function is called with `function_arguments`. `arguments` are only shown in the error; `pinned_bytes` is
    explained at :func:`error_of`.
    """
    try:
        return function(*function_arguments)
    except _load_modules().pyverbs_error.PyverbsError as error:
        error_code = getattr(error, "error_code", _NO_ERRNO)
        # Some functions of pyverbs negate the errno.
        error_number = None if error_code in {_NO_ERRNO, 0} else abs(error_code)
        detail = "" if error_number is not None else str(error)
        if operation in {_errors.DEVICE_LIST, _errors.OPEN_DEVICE} and error_number is None:
            error_number, description = _read_device_list_errno()
            detail = f"{error}; {description}"
        raise _errors.error_of(
            operation=operation,
            error_number=error_number,
            arguments=arguments or {},
            detail=detail,
            pinned_bytes=pinned_bytes,
        ) from error


def _create(operation: str, function: Callable[..., Any], *function_arguments: Any, **error_fields: Any) -> Any:
    """Call a function that creates an object, and keep the object alive until `close`, even if the caller drops it.

    The destructors of pyverbs would release such objects in any order, at the latest when the interpreter ends. At that
    point pyverbs 44 releases a dma-buf region twice.
    """
    instance = call(operation, function, *function_arguments, **error_fields)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(instance))
    _open_objects.ids.add(id(instance))
    return instance


def close(operation: str, instance: Any) -> None:
    """Close an object that `_create` returned in this process.

    `operation` is the function of libibverbs that ``close`` of the object calls.
    """
    if id(instance) in _open_objects.ids:
        call(operation, instance.close)
        _open_objects.ids.remove(id(instance))
        _domain_pointers.pop(id(instance), None)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(instance))


@functools.cache
def _load_library() -> ctypes.CDLL:
    """Return the libibverbs that pyverbs has loaded."""
    _load_modules()
    library = ctypes.CDLL(_LIBRARY_SONAME, use_errno=True)
    pointer, uint64 = ctypes.c_void_p, ctypes.c_uint64
    library.ibv_get_device_list.restype = pointer
    library.ibv_get_device_list.argtypes = (ctypes.POINTER(ctypes.c_int),)
    library.ibv_free_device_list.restype = None
    library.ibv_free_device_list.argtypes = (pointer,)
    library.ibv_reg_dmabuf_mr.restype = ctypes.POINTER(_IbvMr)
    library.ibv_reg_dmabuf_mr.argtypes = (pointer, uint64, ctypes.c_size_t, uint64, ctypes.c_int, ctypes.c_int)
    library.ibv_reg_mr.restype = ctypes.POINTER(_IbvMr)
    library.ibv_reg_mr.argtypes = (pointer, pointer, ctypes.c_size_t, ctypes.c_int)
    library.ibv_dereg_mr.restype = ctypes.c_int
    library.ibv_dereg_mr.argtypes = (ctypes.POINTER(_IbvMr),)
    return library


def _read_device_list_errno() -> tuple[int | None, str]:
    """Call ibv_get_device_list again, because pyverbs does not keep the errno of its own call.

    Return the errno, or None if the new call succeeds, and a text about this for the error message.
    """
    library, device_count = _load_library(), ctypes.c_int()
    ctypes.set_errno(0)
    devices, error_number = library.ibv_get_device_list(ctypes.byref(device_count)), ctypes.get_errno()
    if devices:
        library.ibv_free_device_list(devices)
        return None, "a second call succeeded"
    return error_number or None, "the errno comes from a second call, because pyverbs does not keep the first one"


def list_devices() -> list[DeviceEntry]:
    """Return the result of ibv_get_device_list."""
    devices = call(_errors.DEVICE_LIST, _load_modules().device.get_device_list)
    return [DeviceEntry(device.name.decode(), device.guid) for device in devices]


def open_device(name: str) -> object:
    """Call ibv_open_device and return the context."""
    return _create(_errors.OPEN_DEVICE, lambda: _load_modules().device.Context(name=name), arguments={"name": name})


def query_ports(context: Any) -> list[PortAttributes]:
    """Return the result of ibv_query_port for every port that ibv_query_device reports, port 1 first."""
    port_count = call("ibv_query_device", context.query_device).phys_port_cnt
    field_names = ("state", "active_mtu", "lid", "link_layer", "gid_tbl_len")
    attributes_by_port = [
        call("ibv_query_port", context.query_port, port, arguments={"port": port}) for port in range(1, port_count + 1)
    ]
    return [PortAttributes(*(getattr(attributes, name) for name in field_names)) for attributes in attributes_by_port]


def query_gids(context: Any, entries_max: int) -> list[GidEntry]:
    """Return the nonzero GIDs of all ports, by ibv_query_gid_table."""
    entries = call("ibv_query_gid_table", context.query_gid_table, entries_max, arguments={"max_entries": entries_max})
    return [GidEntry(entry.port_num, entry.gid_index, entry.gid_str(), entry.gid_type) for entry in entries]


def allocate_domain(context: Any) -> object:
    """Call ibv_alloc_pd and return the protection domain."""
    domain = _create("ibv_alloc_pd", _load_modules().pd.PD, context)
    pointer = int(domain.pd) if exposes_domain_pointers() else _layout.find_domain_pointer(domain, context)
    if pointer is not None:
        _domain_pointers[id(domain)] = pointer
    return domain


class _IbvMr(ctypes.Structure):
    """``struct ibv_mr`` of verbs.h, which is part of the ABI of libibverbs."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("addr", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("handle", ctypes.c_uint32),
        ("lkey", ctypes.c_uint32),
        ("rkey", ctypes.c_uint32),
    )


assert (_IbvMr.length.offset, _IbvMr.lkey.offset, _IbvMr.rkey.offset) == (24, 36, 40)  # noqa: S101 - the 64-bit ABI.


def export_host_buffer(view: memoryview) -> tuple[object, int]:
    """Return an object that keeps a writable host buffer from being moved or resized, and the address of the buffer."""
    buffer_export = (ctypes.c_char * view.nbytes).from_buffer(view)
    return buffer_export, ctypes.addressof(buffer_export)


def register_address(domain: Any, *, address: int, length_bytes: int, access: int, is_device: bool) -> NativeRegion:
    """Register host memory, or device memory by its address, with ibv_reg_mr."""
    operation = _errors.REG_ADDRESS if is_device else _errors.REG_MR
    error_fields: dict[str, Any] = {
        "arguments": {"address": address, "length_bytes": length_bytes, "access": access},
        "pinned_bytes": 0 if is_device else length_bytes,
    }
    pointer = domain_pointer(domain)
    if pointer is not None:
        region_pointer = _load_library().ibv_reg_mr(pointer, address, length_bytes, access)
        return _make_region(operation, region_pointer, iova=address, **error_fields)
    region = _create(
        operation, lambda: _load_modules().mr.MR(domain, length_bytes, access, address=address), **error_fields
    )
    return NativeRegion(region.lkey, region.rkey, address, lambda: close("ibv_dereg_mr", region))


def register_dmabuf(
    domain: Any, *, fd: int, offset_bytes: int, length_bytes: int, iova: int, access: int
) -> NativeRegion:
    """Register a dma-buf with ibv_reg_dmabuf_mr.

    The region has the given `iova` if the pointer of the domain is known. Otherwise its iova is the offset in the
    dma-buf, because ``DmaBufMR`` of every version of pyverbs forces this value.

    ``DmaBufMR`` also holds the GIL. The call by ctypes releases the GIL, so that other threads can run: pinning a
    large range takes long.
    """
    arguments = {"fd": fd, "offset_bytes": offset_bytes, "length_bytes": length_bytes, "access": access}
    pointer = domain_pointer(domain)
    if pointer is not None:
        region_pointer = _load_library().ibv_reg_dmabuf_mr(pointer, offset_bytes, length_bytes, iova, fd, access)
        return _make_region(_errors.REG_DMABUF_MR, region_pointer, iova=iova, arguments={**arguments, "iova": iova})
    region = _create(
        _errors.REG_DMABUF_MR,
        lambda: _load_modules().mr.DmaBufMR(domain, length_bytes, access, fd, offset_bytes),
        arguments={**arguments, "iova": offset_bytes},
    )
    return NativeRegion(region.lkey, region.rkey, offset_bytes, lambda: close("ibv_dereg_mr", region))


def _make_region(
    operation: str, region_pointer: Any, *, iova: int, arguments: Mapping[str, object], pinned_bytes: int = 0
) -> NativeRegion:
    """Return the region that ctypes registered. If the call returned NULL, raise the error for the current errno."""
    error_number = ctypes.get_errno()
    if not region_pointer:
        raise _errors.error_of(
            operation=operation, error_number=error_number, arguments=arguments, pinned_bytes=pinned_bytes
        )
    lkey = int(region_pointer.contents.lkey)
    region_id = id(region_pointer)
    _open_objects.ids.add(region_id)

    def deregister() -> None:
        if region_id not in _open_objects.ids:
            return  # The region is deregistered, or belongs to the parent of this forked process.
        return_codes: list[int] = []
        try:
            # The call and the storing of its result are one call of C code, in which no signal handler runs. After an
            # interrupt, a second deregister() therefore knows whether the region is gone. It must not call ibv_dereg_mr
            # again then, because another region could have got the same ibv_mr address.
            return_codes.extend(map(_load_library().ibv_dereg_mr, (region_pointer,)))
        finally:
            if return_codes == [0]:
                _open_objects.ids.discard(region_id)
        if return_codes[0]:
            raise _errors.error_of(operation="ibv_dereg_mr", error_number=return_codes[0], arguments={"lkey": lkey})

    return NativeRegion(lkey, int(region_pointer.contents.rkey), iova, deregister)


def probe_dmabuf(domain: Any, *, length_bytes: int, access: int) -> ApiError | None:
    """Return None if dma-buf registration is supported, else the error.

    The probe registers a descriptor that is not open. EBADF means that libibverbs, the driver and the kernel
    accepted everything else.
    """
    try:
        region = register_dmabuf(domain, fd=-1, offset_bytes=0, length_bytes=length_bytes, iova=0, access=access)
    except ApiError as error:
        return None if error.errno == errno.EBADF else error
    region.close()
    return None


def create_channel(context: Any) -> object:
    """Call ibv_create_comp_channel and return the completion channel."""
    return _create("ibv_create_comp_channel", _load_modules().cq.CompChannel, context)


def event_fd(channel: Any) -> int | None:
    """Return the descriptor of a completion channel, for poll(2). None if pyverbs does not expose it (before 59)."""
    return int(channel.fd) if hasattr(type(channel), "fd") else None


def create_completion_queue(context: Any, *, depth: int, channel: Any) -> object:
    """Call ibv_create_cq and return the completion queue."""
    return _create("ibv_create_cq", _load_modules().cq.CQ, context, depth, None, channel, 0, arguments={"cqe": depth})


def poll_completions(queue: Any, count_max: int) -> list[WorkCompletion]:
    """Return up to `count_max` completions, by ibv_poll_cq."""
    _count, entries = call("ibv_poll_cq", queue.poll, count_max)
    return [
        WorkCompletion(
            entry.wr_id,
            entry.status,
            entry.opcode,
            entry.byte_len,
            socket.ntohl(entry.imm_data) if entry.wc_flags & _WC_WITH_IMM else None,
            entry.vendor_err,
            entry.qp_num,
        )
        for entry in entries
    ]


def request_notification(queue: Any, *, solicited_only: bool) -> None:
    """Call ibv_req_notify_cq."""
    call("ibv_req_notify_cq", queue.req_notify, solicited_only)


def take_event(channel: Any, queue: Any) -> None:
    """Take one event with ibv_get_cq_event and acknowledge it with ibv_ack_cq_events.

    If there is no event, the call blocks while it holds the GIL.
    """
    call("ibv_get_cq_event", channel.get_cq_event, queue)
    call("ibv_ack_cq_events", queue.ack_events, 1)


def create_queue_pair(
    domain: Any, *, send_queue: Any, receive_queue: Any, limits: Mapping[str, int]
) -> tuple[object, int]:
    """Create a reliable connected queue pair with ibv_create_qp. Return the queue pair and its number.

    `limits` has the fields of ibv_qp_cap.
    """
    qp_module = _load_modules().qp
    attributes = qp_module.QPInitAttr(
        qp_type=_QPT_RC, scq=send_queue, rcq=receive_queue, cap=qp_module.QPCap(**limits), sq_sig_all=0
    )
    queue_pair = _create("ibv_create_qp", qp_module.QP, domain, attributes, arguments=limits)
    return queue_pair, int(queue_pair.qp_num)


def modify_queue_pair(
    queue_pair: Any, *, mask: int, address: Mapping[str, Any] | None = None, **attributes: int
) -> None:
    """Call ibv_modify_qp with attributes named as in ibv_qp_attr.

    `address` has the fields of ibv_ah_attr and of its ibv_global_route.
    """
    qp_attr = _load_modules().qp.QPAttr()
    for attribute_name, attribute_value in attributes.items():
        setattr(qp_attr, attribute_name, attribute_value)
    if address is not None:
        addr_module, address_fields = _load_modules().addr, dict(address)
        # pyverbs expects the fields of ibv_global_route in an object of their own.
        gid, sgid_index, hop_limit = (address_fields.pop(name) for name in ("gid", "sgid_index", "hop_limit"))
        route = addr_module.GlobalRoute(dgid=addr_module.GID(gid), sgid_index=sgid_index, hop_limit=hop_limit)
        qp_attr.ah_attr = addr_module.AHAttr(gr=route, **address_fields)
    call("ibv_modify_qp", queue_pair.modify, qp_attr, mask, arguments={"mask": mask, **attributes, **(address or {})})


def query_queue_pair_state(queue_pair: Any) -> int:
    """Return the state of a queue pair, by ibv_query_qp."""
    return int(call("ibv_query_qp", queue_pair.query, _QP_STATE)[0].qp_state)


def post_send(
    queue_pair: Any,
    *,
    work_id: int,
    opcode: int,
    flags: int,
    elements: Sequence[tuple[int, int, int]],
    remote: tuple[int, int] | None,
    immediate: int,
) -> None:
    """Post one send request with ibv_post_send. Elements are (address, length, lkey), `remote` is (rkey, address)."""
    sges = [_load_modules().wr.SGE(*element) for element in elements or _EMPTY_ELEMENTS]
    request = _load_modules().wr.SendWR(
        wr_id=work_id,
        opcode=opcode,
        num_sge=len(sges),
        imm_data=socket.htonl(immediate),
        sg=sges,
        send_flags=flags,
    )
    if remote is not None:
        request.set_wr_rdma(*remote)
    try:
        call("ibv_post_send", queue_pair.post_send, request, arguments={"opcode": opcode, "elements": len(elements)})
    finally:
        _close_all(request, *sges)


def post_receive(queue_pair: Any, *, work_id: int, elements: Sequence[tuple[int, int, int]]) -> None:
    """Post one receive request with ibv_post_recv."""
    sges = [_load_modules().wr.SGE(*element) for element in elements or _EMPTY_ELEMENTS]
    request = _load_modules().wr.RecvWR(wr_id=work_id, num_sge=len(sges), sg=sges)
    try:
        call("ibv_post_recv", queue_pair.post_recv, request, arguments={"elements": len(elements)})
    finally:
        _close_all(request, *sges)


def _close_all(*native_objects: Any) -> None:
    # Up to pyverbs 59 the destructors of SGE, SendWR and RecvWR have a misspelt name and never run.
    for native_object in native_objects:
        native_object.close()
