"""The RDMA operations that a peer process executes when a test case requests them."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gdrkit import pattern, verbs
from gdrkit.buffers import DmabufRange, check_range
from gdrkit.errors import Reason, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.harness.peer_objects import ObjectTable

__all__ = ["operations"]

_DEFAULT_QUEUE_DEPTH = 256
_OPERATION_NAMES = (
    "open_nic",
    "buffer",
    "dmabuf_region",
    "fill",
    "check",
    "contents",
    "queue_pair",
    "connect",
    "write",
    "read",
    "send",
    "post_write",
    "post_read",
    "post_send",
    "post_receive",
    "wait",
    "wait_received",
    "state",
)


class _QueuePairWithQueue:
    """A queue pair, and the completion queue that only this queue pair uses."""

    def __init__(self, nic: verbs.Nic, *, depth: int, limits: dict[str, Any]) -> None:
        self.nic = nic
        self.completion_queue = nic.completion_queue(depth=depth)
        try:
            self.queue_pair = nic.queue_pair(self.completion_queue, **limits)
        except BaseException:
            self.completion_queue.close()
            raise

    def close(self) -> None:
        self.queue_pair.close()
        self.completion_queue.close()


class _Buffer:
    """Registered host memory of this process."""

    def __init__(self, nic: verbs.Nic, *, length_bytes: int, access: verbs.Access) -> None:
        self.data = bytearray(length_bytes)
        self.region = nic.register_host(self.data, access=access)

    def fill(self, *, seed: int, offset_bytes: int, length_bytes: int, pattern_offset_bytes: int) -> None:
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=len(self.data))
        payload = pattern.payload(length_bytes, seed=seed, offset_bytes=pattern_offset_bytes)
        # Assignment to a slice of a bytearray may try to resize the bytearray, which fails while it is registered. So
        # the bytes are assigned to a slice of a memoryview.
        memoryview(self.data)[offset_bytes : offset_bytes + length_bytes] = payload

    def close(self) -> None:
        self.region.close()


def operations(objects: ObjectTable) -> dict[str, Callable[..., Any]]:
    """Return the RDMA operations on the objects of this process, by name."""
    verbs_operations = _VerbsOperations(objects)
    return {name: getattr(verbs_operations, name) for name in _OPERATION_NAMES}


class _VerbsOperations:
    """The operations that a request can name. A request passes the arguments by name.

    `nic`, `buffer` and `queue_pair` are handle numbers in the object table. `remote` and `endpoint` are dicts with the
    fields of a RemoteRange and an Endpoint. `pattern_offset_bytes` is the offset of the first byte in the pattern of
    `seed`; see :mod:`gdrkit.pattern`.
    """

    def __init__(self, objects: ObjectTable) -> None:
        self._objects = objects

    def open_nic(self, name: str | None, port: int | None, gid_index: int | None) -> dict[str, Any]:
        active_nics = [nic_info for nic_info in verbs.list_nics() if nic_info.active]
        selected_nic = next((nic_info for nic_info in active_nics if name in (None, nic_info.name)), None)
        if selected_nic is None:
            active_nic_names = ", ".join(nic_info.name for nic_info in active_nics) or "none"
            subject = "no NIC" if name is None else f"no NIC called {name!r}"
            message = f"{subject} has an active port; the NICs with an active port are: {active_nic_names}"
            raise UsageError(message, reason=Reason.NO_DEVICE)
        nic = verbs.Nic.open(selected_nic.name, port=port or selected_nic.active_port or 1, gid_index=gid_index)
        return {"handle": self._objects.add(nic), "name": nic.name, "gid": nic.gid}

    def buffer(self, nic: int, length_bytes: int, access: int) -> dict[str, Any]:
        buffer = _Buffer(self._get_nic(nic), length_bytes=length_bytes, access=verbs.Access(access))
        return {"handle": self._objects.add(buffer), "remote": buffer.region.remote().to_dict()}

    def dmabuf_region(
        self, nic: int, *, offset_bytes: int, length_bytes: int, address: int, access: int, descriptors: list[int]
    ) -> dict[str, Any]:
        dmabuf_range = DmabufRange(
            descriptors[0], offset_bytes=offset_bytes, length_bytes=length_bytes, address=address
        )
        try:
            region = self._get_nic(nic).register_dmabuf(dmabuf_range, access=verbs.Access(access))
        finally:
            # Otherwise `dmabuf_range` would close the descriptor, which the caller of this operation closes.
            dmabuf_range.take()
        return {"handle": self._objects.add(region), "remote": region.remote().to_dict()}

    def fill(self, buffer: int, **arguments: int) -> None:
        self._get_buffer(buffer).fill(**arguments)

    def check(self, buffer: int, *, seed: int, offset_bytes: int, length_bytes: int, pattern_offset_bytes: int) -> str:
        data = self._read_bytes(buffer, offset_bytes, length_bytes)
        pattern.check(data, seed=seed, offset_bytes=pattern_offset_bytes)
        return hashlib.sha256(data).hexdigest()

    def contents(self, buffer: int, offset_bytes: int, length_bytes: int) -> str:
        return self._read_bytes(buffer, offset_bytes, length_bytes).hex()

    def queue_pair(self, nic: int, depth: int | None, limits: dict[str, int]) -> dict[str, Any]:
        pair = _QueuePairWithQueue(self._get_nic(nic), depth=depth or _DEFAULT_QUEUE_DEPTH, limits=limits)
        return {"handle": self._objects.add(pair), "endpoint": pair.queue_pair.endpoint().to_dict()}

    def connect(self, queue_pair: int, endpoint: dict[str, Any], options: dict[str, Any]) -> None:
        self._get_pair(queue_pair).queue_pair.connect(verbs.Endpoint.from_dict(endpoint), **options)

    def write(
        self,
        queue_pair: int,
        remote: dict[str, Any],
        *,
        seed: int,
        length_bytes: int,
        local_offset_bytes: int,
        pattern_offset_bytes: int,
        immediate: int | None,
        timeout_ms: float,
    ) -> dict[str, Any]:
        pair = self._get_pair(queue_pair)
        buffer = self._register_temporary_buffer(pair, local_offset_bytes + length_bytes)
        try:
            buffer.fill(
                seed=seed,
                offset_bytes=local_offset_bytes,
                length_bytes=length_bytes,
                pattern_offset_bytes=pattern_offset_bytes,
            )
            pair.queue_pair.post_write(
                buffer.region,
                verbs.RemoteRange.from_dict(remote),
                work_id=0,
                local_offset_bytes=local_offset_bytes,
                length_bytes=length_bytes,
                immediate=immediate,
            )
            return _make_completion_data(pair.queue_pair.wait(timeout_ms))
        finally:
            buffer.close()

    def read(
        self,
        queue_pair: int,
        remote: dict[str, Any],
        *,
        length_bytes: int,
        local_offset_bytes: int,
        seed: int | None,
        pattern_offset_bytes: int,
        timeout_ms: float,
    ) -> dict[str, Any]:
        pair = self._get_pair(queue_pair)
        buffer = self._register_temporary_buffer(pair, local_offset_bytes + length_bytes)
        try:
            pair.queue_pair.post_read(
                buffer.region,
                verbs.RemoteRange.from_dict(remote),
                work_id=0,
                local_offset_bytes=local_offset_bytes,
                length_bytes=length_bytes,
            )
            completion = pair.queue_pair.wait(timeout_ms)
            data = bytes(memoryview(buffer.data)[local_offset_bytes:])
            if completion.status is verbs.Status.SUCCESS and seed is not None:
                pattern.check(data, seed=seed, offset_bytes=pattern_offset_bytes)
            return {"completion": _make_completion_data(completion), "sha256": hashlib.sha256(data).hexdigest()}
        finally:
            buffer.close()

    def send(
        self,
        queue_pair: int,
        *,
        seed: int,
        length_bytes: int,
        pattern_offset_bytes: int,
        immediate: int | None,
        timeout_ms: float,
    ) -> dict[str, Any]:
        pair = self._get_pair(queue_pair)
        buffer = self._register_temporary_buffer(pair, length_bytes)
        try:
            buffer.fill(seed=seed, offset_bytes=0, length_bytes=length_bytes, pattern_offset_bytes=pattern_offset_bytes)
            pair.queue_pair.post_send(buffer.region, work_id=0, length_bytes=length_bytes, immediate=immediate)
            return _make_completion_data(pair.queue_pair.wait(timeout_ms))
        finally:
            buffer.close()

    def post_write(self, queue_pair: int, buffer: int, remote: dict[str, Any], options: dict[str, Any]) -> None:
        region, remote_range = self._get_buffer(buffer).region, verbs.RemoteRange.from_dict(remote)
        self._get_pair(queue_pair).queue_pair.post_write(region, remote_range, **options)

    def post_read(self, queue_pair: int, buffer: int, remote: dict[str, Any], options: dict[str, Any]) -> None:
        region, remote_range = self._get_buffer(buffer).region, verbs.RemoteRange.from_dict(remote)
        self._get_pair(queue_pair).queue_pair.post_read(region, remote_range, **options)

    def post_send(self, queue_pair: int, buffer: int, options: dict[str, Any]) -> None:
        self._get_pair(queue_pair).queue_pair.post_send(self._get_buffer(buffer).region, **options)

    def post_receive(self, queue_pair: int, buffer: int | None, options: dict[str, Any]) -> None:
        local_region = () if buffer is None else self._get_buffer(buffer).region
        self._get_pair(queue_pair).queue_pair.post_receive(local_region, **options)

    def wait(self, queue_pair: int, timeout_ms: float) -> dict[str, Any]:
        return _make_completion_data(self._get_pair(queue_pair).queue_pair.wait(timeout_ms))

    def wait_received(self, queue_pair: int, timeout_ms: float) -> dict[str, Any]:
        return _make_completion_data(self._get_pair(queue_pair).queue_pair.wait_received(timeout_ms))

    def state(self, queue_pair: int) -> str:
        return self._get_pair(queue_pair).queue_pair.state.name

    def _register_temporary_buffer(self, pair: _QueuePairWithQueue, length_bytes: int) -> _Buffer:
        # A region has at least one byte, but a work request may transfer 0 bytes.
        return _Buffer(pair.nic, length_bytes=max(length_bytes, 1), access=verbs.Access.LOCAL_WRITE)

    def _read_bytes(self, buffer: int, offset_bytes: int, length_bytes: int) -> bytes:
        data = self._get_buffer(buffer).data
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=len(data))
        return bytes(memoryview(data)[offset_bytes : offset_bytes + length_bytes])

    def _get_nic(self, handle_number: int) -> verbs.Nic:
        nic: verbs.Nic = self._objects.get(handle_number, verbs.Nic)
        return nic

    def _get_pair(self, handle_number: int) -> _QueuePairWithQueue:
        pair: _QueuePairWithQueue = self._objects.get(handle_number, _QueuePairWithQueue)
        return pair

    def _get_buffer(self, handle_number: int) -> _Buffer:
        buffer: _Buffer = self._objects.get(handle_number, _Buffer)
        return buffer


def _make_completion_data(completion: verbs.Completion) -> dict[str, Any]:
    return asdict(completion)
