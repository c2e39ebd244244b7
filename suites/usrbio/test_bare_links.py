"""A client publishes device memory by a link without a dma-buf: the agent can register it only as peer memory."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from typing import TYPE_CHECKING

import pytest
from support.raw_usrbio import AgentProcess, LinkClient, RawClient, RawRing, Refusal

from gdrkit import cuda, pattern
from gdrkit.cuda.pointer import address_range
from gdrkit.errors import Api
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import host, needs, software, verbs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs(verbs.nic(), cuda_needs.device())


@pytest.fixture
def memory(device: cuda.Device) -> Iterator[cuda.DeviceMemory]:
    with device.allocate(MIB) as device_memory:
        yield device_memory


def describe_link(memory: cuda.DeviceMemory) -> tuple[uuid.UUID, str, str]:
    """Return UUID, name and target of a link that publishes `memory` by a CUDA IPC handle instead of a dma-buf."""
    iov_id = uuid.uuid4()
    with memory.device.current():
        allocation = address_range(memory.address)
    range_text = (
        f"allocation/{allocation.length_bytes}/offset/{memory.address - allocation.base}/size/{memory.length_bytes}"
    )
    return iov_id, f"{iov_id}.gdr.d0", f"gdr://v2/device/0/{range_text}/ipc/{cuda.export_handle(memory).hex()}"


@needs(verbs.peer_memory)
@pytest.mark.parametrize(
    "agent_visible_devices",
    [None, pytest.param("1,0", marks=needs(cuda_needs.device(count_min=2)), id="agent-numbers-devices-differently")],
)
def test_link_alone_registers_memory_by_its_address(
    tmp_path: Path, memory: cuda.DeviceMemory, agent_visible_devices: str | None, seed: int
) -> None:
    visible_devices_environ = {} if agent_visible_devices is None else {"CUDA_VISIBLE_DEVICES": agent_visible_devices}
    (tmp_path / "file").write_bytes(pattern.payload(MIB, seed=seed))
    iov_id, link_name, target = describe_link(memory)
    memory.fill(0xA5)
    agent_process = AgentProcess(tmp_path, environ={**os.environ, **visible_devices_environ})
    with agent_process as agent, RawClient(tmp_path) as client, contextlib.ExitStack() as stack:
        ring = RawRing(4, for_read=True)
        stack.callback(ring.close)
        client.publish(link_name, target)
        client.publish_ring(ring)
        fd = os.open(tmp_path / "file", os.O_RDONLY)
        stack.callback(os.close, fd)
        inode = client.register_file(fd)
        ring.prepare(iov_id.bytes, inode=inode, length=64 * KIB, buffer_offset=4097, file_offset=17)
        ring.submit()
        assert [result for _, result, _ in ring.wait(1)] == [64 * KIB]
        client.unpublish(link_name)
    assert agent.process.returncode == 0, agent.error_output
    pattern.check(memory.read(offset_bytes=4097, length_bytes=64 * KIB), seed=seed, offset_bytes=17)
    assert memory.read(length_bytes=4097) == b"\xa5" * 4097
    assert memory.read(offset_bytes=4097 + 64 * KIB, length_bytes=64) == b"\xa5" * 64


@needs(verbs.peer_memory, host.fuse)
def test_device_memory_is_read_without_the_socket(tmp_path: Path, memory: cuda.DeviceMemory, seed: int) -> None:
    mount, store = tmp_path / "mount", tmp_path / "store"
    mount.mkdir()
    store.mkdir()
    (store / "file").write_bytes(pattern.payload(MIB, seed=seed))
    iov_id, link_name, target = describe_link(memory)
    memory.fill(0xA5)
    with AgentProcess(mount, "--store", str(store), "--fuse") as agent:
        client = LinkClient(mount)
        os.symlink(target, client.iovs_folder / link_name)  # noqa: PTH211 - a Path would change gdr://.
        with contextlib.closing(RawRing(4, for_read=True)) as ring, (mount / "file").open("rb") as file:
            client.publish_ring(ring)
            inode = os.fstat(file.fileno()).st_ino
            ring.prepare(iov_id.bytes, inode=inode, length=64 * KIB, buffer_offset=4097, file_offset=17)
            ring.submit()
            assert [result for _, result, _ in ring.wait(1)] == [64 * KIB]
            client.unpublish(ring.link_name)
        client.unpublish(link_name)
        assert agent.terminate() == 0, agent.error_output
    pattern.check(memory.read(offset_bytes=4097, length_bytes=64 * KIB), seed=seed, offset_bytes=17)
    assert memory.read(length_bytes=4097) == b"\xa5" * 4097
    assert memory.read(offset_bytes=4097 + 64 * KIB, length_bytes=64) == b"\xa5" * 64


def test_link_with_the_size_of_another_allocation_is_refused(tmp_path: Path, memory: cuda.DeviceMemory) -> None:
    _iov_id, link_name, target = describe_link(memory)
    with memory.device.current():
        allocation = address_range(memory.address)
    wrong_target = target.replace(
        f"allocation/{allocation.length_bytes}/", f"allocation/{allocation.length_bytes + 1}/"
    )
    with AgentProcess(tmp_path) as agent, RawClient(tmp_path) as client:
        with pytest.raises(Refusal, match=f"states an allocation of {allocation.length_bytes + 1} bytes") as error_info:
            client.publish(link_name, wrong_target)
        assert error_info.value.errno == errno.EOPNOTSUPP
    assert agent.process.returncode == 0, agent.error_output


@needs(software(Api.VERBS))
def test_link_alone_without_peer_memory_is_refused(
    tmp_path: Path, memory: cuda.DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDRKIT_TWINS_PEERMEM", "0")
    _iov_id, link_name, target = describe_link(memory)
    with AgentProcess(tmp_path) as agent, RawClient(tmp_path) as client:
        # Without peer memory, the registration by the address fails with EFAULT.
        with pytest.raises(Refusal, match="EFAULT") as error_info:
            client.publish(link_name, target)
        assert error_info.value.errno == errno.EOPNOTSUPP
        assert not [link for link in (tmp_path / "3fs-virt" / "iovs").iterdir() if link.name == link_name]
    assert agent.process.returncode == 0, agent.error_output
