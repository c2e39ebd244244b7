"""Tests of limits and deadlines of connections without a session, and of a client during an attack on its server."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest
from support.other_user import folder_for_all_users, run_program
from support.processes import wait_until
from support.python_child import module_command, suites_environ
from support.storage import run_storage_server

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

    from support.storage import StorageServer

    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic

# Number of operations of a client during the attack. The evidence for a release must come from a run with
# 100,000 operations.
OPERATION_COUNT = int(os.environ.get("GDRKIT_HONEST_OPERATIONS", "2000"))
SLOW_CONNECTION_COUNT = 300
OPERATIONS_PER_BATCH, OPERATION_BYTES = 50, 4 * KIB
NEW_NETWORK_NAMESPACE = ("unshare", "--user", "--map-root-user", "--net")
# The need of cases in a new network namespace: this user may create the namespace, and the kernel supports IPv6.
NETWORK_NAMESPACE = host.program(
    *NEW_NETWORK_NAMESPACE, "sh", "-c", "ip -6 address add 2001:db8::1 dev lo && echo allowed"
)


@contextlib.contextmanager
def run_slow_hellos(server: StorageServer) -> Iterator[list[int]]:
    """Run the attack of :mod:`storage.slow_hellos`.

    After the block, the yielded list holds one number: the count of connections that the attack made.
    """
    address, connection_counts = ServerAddress.parse(server.address), list[int]()
    with subprocess.Popen(
        module_command("storage.slow_hellos", address.host, address.port, SLOW_CONNECTION_COUNT),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=suites_environ(),
    ) as attack:
        assert attack.stdout is not None
        try:
            assert attack.stdout.readline() == b"ready\n"
            yield connection_counts
            count_text, _ = attack.communicate(timeout=60)
            connection_counts.append(int(count_text))
        finally:
            attack.kill()


def run_in_network_namespace(action: str) -> object:
    """Run :mod:`storage.listened_addresses` in a new network namespace, and return its result."""
    completed_process = subprocess.run(
        [*NEW_NETWORK_NAMESPACE, *module_command("storage.listened_addresses", action)],
        env=suites_environ(),
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    return json.loads(completed_process.stdout)


def is_closed_by_server(connected_socket: socket.socket, timeout_s: float) -> bool:
    """Return whether the server closes a connection within `timeout_s`."""
    connected_socket.settimeout(timeout_s)
    try:
        return connected_socket.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@needs(verbs.nic())
@pytest.mark.timeout(300 + OPERATION_COUNT / 50)
def test_client_works_beside_slow_hellos(server: StorageServer, nic: Nic, seed: int, evidence: Evidence) -> None:
    data = pattern.payload(OPERATIONS_PER_BATCH * OPERATION_BYTES, seed=seed)
    operation_count = session_count = 0
    with run_slow_hellos(server) as connection_counts:
        begin_s = time.monotonic()
        while operation_count < OPERATION_COUNT:
            # A new session begins after every 400 operations, because the attack targets the start of sessions.
            with server.connect(nic) as client, client.open("file", write=True, create=True) as file:
                session_count += 1
                sent_data, received_data = bytearray(data), bytearray(len(data))
                with client.register(sent_data) as source_buffer, client.register(received_data) as target_buffer:
                    request_pairs = [
                        (
                            IORequest(
                                file,
                                offset_bytes,
                                source_buffer.subrange(offset_bytes=offset_bytes, length_bytes=OPERATION_BYTES),
                            ),
                            IORequest(
                                file,
                                offset_bytes,
                                target_buffer.subrange(offset_bytes=offset_bytes, length_bytes=OPERATION_BYTES),
                            ),
                        )
                        for offset_bytes in range(0, len(data), OPERATION_BYTES)
                    ]
                    for _ in range(4):
                        received_data[:] = bytes(len(data))
                        results = client.batch_write([write_request for write_request, _ in request_pairs])
                        results += client.batch_read([read_request for _, read_request in request_pairs])
                        assert [result.length_bytes for result in results] == [OPERATION_BYTES] * (
                            2 * OPERATIONS_PER_BATCH
                        )
                        assert received_data == data
                        operation_count += len(results)
        duration_s = time.monotonic() - begin_s
    evidence.number("operations_count", operation_count)
    evidence.number("sessions_count", session_count)
    evidence.number("slow_connections_count", connection_counts[0])
    evidence.number("duration_s", duration_s)


@needs(verbs.nic())
def test_first_request_has_one_deadline_for_all_its_bytes(server: StorageServer) -> None:
    # "G" is the first byte of a valid frame. The deadline of 10 s is not extended by a byte that arrives every second.
    with ServerAddress.parse(server.address).connect(10) as connection:
        begin_s, sent_bytes = time.monotonic(), 0
        while not select.select([connection], (), (), 1)[0] and sent_bytes < 20:
            with contextlib.suppress(OSError):
                sent_bytes += connection.send(b"G")
        assert is_closed_by_server(connection, 0)
        assert 8 < time.monotonic() - begin_s < 15


@needs(verbs.nic())
def test_host_above_its_limit_loses_its_oldest_connections(server: StorageServer) -> None:
    # At most 64 connections of a host may be without a request, so the server closes the 16 oldest of 80.
    address = ServerAddress.parse(server.address)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(address.connect(10)) for _ in range(80)]
        for connection in connections:
            connection.sendall(b"G")
        assert all(is_closed_by_server(connection, 5) for connection in connections[:16])
        assert select.select(connections[16:], (), (), 0.2)[0] == []
        with server.connect() as client:
            assert client.list_folder() == ()


@needs(verbs.nic())
def test_refused_connections_share_a_log_line(server: StorageServer) -> None:
    # The server refuses 50 connections with an invalid request and three with a wrong token.
    address = ServerAddress.parse(server.address)
    for _ in range(50):
        with address.connect(10) as connection:
            connection.sendall(bytes(64))
            assert is_closed_by_server(connection, 10)
    for _ in range(3):
        with pytest.raises(ApiError):
            server.connect(token="wrong")  # noqa: S106 - not a password.
    server.process.terminate()
    assert server.process.wait(20) == 0
    lines = [line for line in server.read_log().splitlines() if "refused" in line]
    assert len(lines) <= 3, lines
    assert sum(int(count) for count in re.findall(r"refused: (\d+)", "\n".join(lines))) == 53, lines


@needs(verbs.nic())
def test_refused_connection_is_logged_within_10_s(server: StorageServer) -> None:
    def is_logged(line_count: int) -> bool:
        return server.read_log().count("connections refused: 1 ") == line_count

    # The server logs the first refusal at once, and the second refusal 10 s after the first.
    for line_count in (1, 2):
        with ServerAddress.parse(server.address).connect(10) as connection:
            connection.sendall(bytes(64))
            assert is_closed_by_server(connection, 10)
        wait_until(partial(is_logged, line_count), "the refusal is logged", timeout_s=15)


@needs(NETWORK_NAMESPACE)
def test_connections_are_counted_by_host_or_ipv6_network() -> None:
    assert run_in_network_namespace("refuse") == {
        "127.0.0.1": "this host",
        "::1": "this host",
        "192.0.2.1": "192.0.2.1",
        "::ffff:192.0.2.1": "192.0.2.1",
        "2001:db8::1": "2001:db8::/64",
        "2001:db8:0:0:ffff::1": "2001:db8::/64",
        "2001:db8:0:1::1": "2001:db8:0:1::/64",
    }


@needs(NETWORK_NAMESPACE)
def test_host_with_the_most_silent_connections_loses_one() -> None:
    # At most 128 connections of all hosts may be silent. If one more connects, the server closes the oldest silent
    # connection of the host that has the most.
    assert run_in_network_namespace("fill") == {"192.0.2.1": [], "192.0.2.2": [0], "192.0.2.3": []}


@needs(verbs.nic(), host.program("ip", "-6", "address", "show", "to", "::1"))
def test_server_listens_on_an_ipv6_address(tmp_path: Path) -> None:
    with run_storage_server(tmp_path / "store", tmp_path / "log", "--listen", "[::1]:0") as server:
        assert re.fullmatch(r"\[::1\]:[1-9]\d*", server.address)
        with server.connect() as client:
            assert client.list_folder() == ()


@needs(verbs.nic())
def test_session_limit_is_64(server: StorageServer, nic: Nic) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(server.connect(nic))
        with pytest.raises(ApiError) as error_info:
            server.connect(nic)
        assert error_info.value.errno == errno.ENOBUFS


# Program that sends a request to a UNIX socket, as this user or as another user, and prints whether a reply came.
STATFS_PROGRAM = """
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


@needs(verbs.nic(), host.capability("CAP_SETUID"), host.package_for_all_users)
def test_server_refuses_another_user_on_its_unix_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # If the server forgets to close a socket, Python closes the socket and prints a warning to standard error.
    monkeypatch.setenv("PYTHONWARNINGS", "always::ResourceWarning")
    with folder_for_all_users() as folder:
        socket_path = folder / "socket"
        with run_storage_server(tmp_path / "store", tmp_path / "log", "--listen", f"unix:{socket_path}"):
            # With this mode, another user can connect. The server reads the user by SO_PEERCRED, and refuses the
            # connection.
            socket_path.chmod(0o777)
            for user, expected_output in (("self", "answered\n"), ("other", "ended\n")):
                completed_process = run_program(STATFS_PROGRAM, str(socket_path), user)
                assert completed_process.stdout == expected_output, completed_process.stderr
        log_text = (tmp_path / "log").read_text()
        assert "from another user" in log_text
        assert "ResourceWarning" not in log_text
