"""Verbs twins (libraries that emulate NICs) connect two network namespaces over TCP, as between two containers.

The environment variable GDRKIT_TWINS_FABRIC makes a twin carry the traffic of its queue pairs over TCP.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import subprocess
import time
from typing import TYPE_CHECKING, cast

import pytest
from rdma import perftest
from support.processes import wait_until
from support.python_child import module_command, suites_environ

from gdrkit.errors import Api
from gdrkit.harness.needs import host, needs, software

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs(
    software(Api.VERBS), host.program("ip"), host.capability("CAP_NET_ADMIN"), host.capability("CAP_SYS_ADMIN")
)
# Limit for the time until a write to a lost machine fails. A queue pair sends 8 times and waits 67 ms (on hardware, up
# to four times as long) for each acknowledgement. The fabric of the twins waits at least one second.
RETRY_LIMIT_S = 10.0


class FabricProcess:
    """A process in a network namespace, which stands for a machine. It runs :mod:`support.fabric_machine`."""

    def __init__(self, namespace: str, *, secret: str) -> None:
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *module_command("support.fabric_machine")],
            env=make_fabric_environ(secret),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # The process writes its endpoint, and the address and the key of its memory.
        self.endpoint_and_memory = cast("dict[str, dict[str, str]]", self._receive())

    def send(self, message: object) -> None:
        """Send a message to the process, as one line of JSON."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def run(self, **command: int) -> str:
        """Send a command, ``write=SEED`` or ``check=SEED``, and return its result."""
        self.send(command)
        return cast("str", self._receive())

    def _receive(self) -> object:
        assert self.process.stdout is not None
        return cast("object", json.loads(self.process.stdout.readline()))


def make_fabric_environ(secret: str) -> dict[str, str]:
    """Return the environment of a process in one of the two namespaces."""
    fabric_variables = {"GDRKIT_TWINS_FABRIC": "tcp://10.79.0.0/24", "GDRKIT_TWINS_FABRIC_SECRET": secret}
    return {**suites_environ(), **fabric_variables}


def _run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def create_two_namespaces() -> Iterator[tuple[str, str]]:
    """Create two network namespaces that a veth pair joins."""
    names = (f"gk{secrets.token_hex(4)}1", f"gk{secrets.token_hex(4)}2")
    try:
        for name in names:
            _run_ip("netns", "add", name)
        _run_ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for index, name in enumerate(names, start=1):
            _run_ip("-n", name, "addr", "add", f"10.79.0.{index}/24", "dev", "eth0")
            _run_ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def start_two_machines(
    namespaces: tuple[str, str], *, fabric_secrets: tuple[str, str]
) -> Iterator[tuple[FabricProcess, FabricProcess]]:
    """Start a process in each namespace, and connect their queue pairs."""
    with contextlib.ExitStack() as stack:
        machines = []
        for namespace, secret in zip(namespaces, fabric_secrets, strict=True):
            machine = FabricProcess(namespace, secret=secret)
            stack.enter_context(machine.process)
            stack.callback(machine.process.kill)
            machines.append(machine)
        first_machine, second_machine = machines
        # Each process connects to the endpoint that it receives, and later writes to the memory of its peer.
        first_machine.send(second_machine.endpoint_and_memory)
        second_machine.send(first_machine.endpoint_and_memory)
        yield first_machine, second_machine


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Return the names of two joined network namespaces."""
    with create_two_namespaces() as names:
        yield names


def test_writes_arrive_on_the_other_machine(namespaces: tuple[str, str], seed: int) -> None:
    with start_two_machines(namespaces, fabric_secrets=("s" * 16, "s" * 16)) as (first_machine, second_machine):
        # The GID of a twin in a fabric ends with its IPv4 address, here 10.79.0.1.
        assert first_machine.endpoint_and_memory["endpoint"]["gid"].endswith(":ffff:0a4f:0001")
        assert second_machine.run(check=0) == "different"
        assert first_machine.run(write=seed) == "SUCCESS"
        assert second_machine.run(check=seed) == "same"
        assert second_machine.run(write=seed + 1) == "SUCCESS"
        assert first_machine.run(check=seed + 1) == "same"


@pytest.mark.parametrize("failure", ["process is killed", "link is down"])
def test_lost_machine_exceeds_retries(namespaces: tuple[str, str], failure: str) -> None:
    with start_two_machines(namespaces, fabric_secrets=("s" * 16, "s" * 16)) as (first_machine, second_machine):
        assert first_machine.run(write=1) == "SUCCESS"
        if failure == "process is killed":
            second_machine.process.kill()
            second_machine.process.wait()
        else:
            _run_ip("-n", namespaces[1], "link", "set", "eth0", "down")
        start_s = time.monotonic()
        assert first_machine.run(write=2) == "RETRY_EXC_ERR"
        assert time.monotonic() - start_s < RETRY_LIMIT_S


def test_machine_with_another_secret_is_refused(namespaces: tuple[str, str]) -> None:
    with start_two_machines(namespaces, fabric_secrets=("s" * 16, "t" * 16)) as (first_machine, second_machine):
        assert first_machine.run(write=1) == "RETRY_EXC_ERR"
        assert second_machine.run(check=1) == "different"


@needs(host.program("ib_write_bw", "-V"))
@pytest.mark.parametrize(
    "program", ["ib_write_bw", "ib_read_bw", "ib_send_bw", "ib_send_bw -c UD", "ib_atomic_bw", "ib_write_lat"]
)
def test_perftest_runs_between_machines(namespaces: tuple[str, str], program: str) -> None:
    # 18515 is the default port of perftest. It is free, because the namespaces are new.
    environ, port = make_fabric_environ("s" * 16), 18515
    # A latency program does fewer operations, because in each operation both processes wait for a processor once.
    operations = 100 if program.endswith("_lat") else 1000
    command = [*program.split(), "-F", "-d", "twin0", "-x", "1", "-n", str(operations), "-p", str(port)]
    passive_command, active_command = (["ip", "netns", "exec", name, *command] for name in namespaces)
    with perftest.start_program(passive_command, environ) as passive_process:
        wait_until(
            lambda: passive_process.poll() is not None or perftest.is_listening(passive_process.pid, port), "a listener"
        )
        with perftest.start_program([*active_command, "10.79.0.1"], environ) as active_process:
            output, _ = active_process.communicate(timeout=60)
        passive_output, _ = passive_process.communicate(timeout=60)
    assert (active_process.returncode, passive_process.returncode) == (0, 0), f"{output}\n{passive_output}"
    # The GID of the peer ends with its IPv4 address.
    assert "255:255:10:79:00:01" in output
    assert re.search(rf"^ *\d+ +{operations} ", output, re.MULTILINE)
