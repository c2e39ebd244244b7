"""Connections without a session: their limits and deadlines, and clients that must be served beside them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from support.other_user import open_folder, run_program
from support.python_child import module_command, suites_environ
from support.storage import storage_server

from gdrkit import pattern
from gdrkit.errors import ApiError
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.storage.address import ServerAddress
from gdrkit.storage.client import IORequest
from gdrkit.units import KIB

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from pathlib import Path

    from support.storage import Service

    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic

# Operations of the client beside an attack. A record needs 100,000.
OPERATIONS = int(os.environ.get("GDRKIT_HONEST_OPERATIONS", "2000"))
ATTACKERS = 300
BATCH, SIZE = 50, 4 * KIB


@contextlib.contextmanager
def slow_hellos(service: Service) -> Iterator[list[int]]:
    """Run an attack by slow hellos. Yield a list, which has the number of its connections after the block."""
    address, opened = ServerAddress.parse(service.address), list[int]()
    with subprocess.Popen(
        module_command("storage.slow_hellos", address.host, address.port, ATTACKERS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=suites_environ(),
    ) as attack:
        assert attack.stdout is not None
        try:
            assert attack.stdout.readline() == b"ready\n"
            yield opened
            count, _ = attack.communicate(timeout=60)
            opened.append(int(count))
        finally:
            attack.kill()


def is_closed(end: socket.socket, timeout_s: float) -> bool:
    """Return whether the server closes a connection in time."""
    end.settimeout(timeout_s)
    try:
        return end.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@needs(verbs.nic())
@pytest.mark.timeout(300 + OPERATIONS / 50)
def test_client_works_beside_slow_hellos(service: Service, nic: Nic, seed: int, evidence: Evidence) -> None:
    data = pattern.payload(BATCH * SIZE, seed=seed)
    done = sessions = 0
    with slow_hellos(service) as opened:
        begin_s = time.monotonic()
        while done < OPERATIONS:
            # A new session begins after every 400 operations, because the attack could displace its hello.
            with service.connect(nic) as client, client.open("file", write=True, create=True) as file:
                sessions += 1
                source, target = bytearray(data), bytearray(len(data))
                with client.register(source) as source_buffer, client.register(target) as target_buffer:
                    parts = [
                        (
                            IORequest(file, at, source_buffer.subrange(offset_bytes=at, length_bytes=SIZE)),
                            IORequest(file, at, target_buffer.subrange(offset_bytes=at, length_bytes=SIZE)),
                        )
                        for at in range(0, len(data), SIZE)
                    ]
                    for _ in range(4):
                        target[:] = bytes(len(data))
                        results = client.batch_write([write for write, _ in parts])
                        results += client.batch_read([read for _, read in parts])
                        assert [each.length_bytes for each in results] == [SIZE] * (2 * BATCH)
                        assert target == data
                        done += len(results)
        duration_s = time.monotonic() - begin_s
    evidence.number("operations_count", done)
    evidence.number("sessions_count", sessions)
    evidence.number("slow_connections_count", opened[0])
    evidence.number("duration_s", duration_s)


@needs(verbs.nic())
def test_first_request_has_one_deadline_for_all_its_bytes(service: Service) -> None:
    with ServerAddress.parse(service.address).connect(10) as end:
        begin_s, sent = time.monotonic(), 0
        while not select.select([end], (), (), 1)[0] and sent < 20:
            with contextlib.suppress(OSError):
                sent += end.send(b"G")
        assert is_closed(end, 0)
        assert 8 < time.monotonic() - begin_s < 15


@needs(verbs.nic())
def test_oldest_silent_connection_of_a_host_ends_first(service: Service) -> None:
    address = ServerAddress.parse(service.address)
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(address.connect(10)) for _ in range(80)]
        for end in ends:
            end.sendall(b"G")
        assert all(is_closed(end, 5) for end in ends[:16])
        assert select.select(ends[16:], (), (), 0.2)[0] == []
        with service.connect() as client:
            assert client.list_folder() == ()


@needs(verbs.nic())
def test_refused_connections_share_a_log_line(service: Service) -> None:
    address = ServerAddress.parse(service.address)
    for _ in range(50):
        with address.connect(10) as end:
            end.sendall(bytes(64))
            assert is_closed(end, 10)
    for _ in range(3):
        with pytest.raises(ApiError):
            service.connect(token="wrong")  # noqa: S106 - not a password.
    service.process.terminate()
    assert service.process.wait(20) == 0
    lines = [line for line in service.log_text().splitlines() if "refused" in line]
    assert len(lines) <= 3, lines
    assert sum(int(each) for each in re.findall(r"refused: (\d+)", "\n".join(lines))) == 53, lines


@needs(verbs.nic())
def test_session_limit_is_64(service: Service, nic: Nic) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(service.connect(nic))
        with pytest.raises(ApiError) as error:
            service.connect(nic)
        assert error.value.errno == errno.ENOBUFS


OTHER_USER = """
import socket, sys
from gdrkit.storage import messages
from gdrkit.storage.address import ServerAddress
from gdrkit.storage.connection import ControlConnection
from gdrkit.storage.control import pack_request
from gdrkit.storage.wire import FrameType
from support.other_user import become_unprivileged
if sys.argv[2] == "other":
    become_unprivileged()
connection = ControlConnection(ServerAddress.parse("unix:" + sys.argv[1]).connect(10))
try:
    connection.send(FrameType.CONTROL_REQUEST, pack_request(messages.Statfs()), sequence=1)
    print("ended" if connection.receive(FrameType.CONTROL_REPLY) is None else "answered")
except (BrokenPipeError, ConnectionResetError):
    print("ended")
"""


@needs(verbs.nic(), host.capability("CAP_SETUID"))
def test_unix_socket_of_serve_refuses_another_user(tmp_path: Path) -> None:
    with open_folder() as folder:
        path = folder / "socket"
        with storage_server(tmp_path / "store", tmp_path / "log", "--listen", f"unix:{path}"):
            # With this mode another user can connect. The server refuses it by SO_PEERCRED.
            path.chmod(0o777)
            for user, expected in (("self", "answered\n"), ("other", "ended\n")):
                result = run_program(OTHER_USER, str(path), user)
                assert result.stdout == expected, result.stderr
        assert "from another user" in (tmp_path / "log").read_text()
