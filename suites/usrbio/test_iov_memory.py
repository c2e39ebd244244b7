"""The memory of iovs: huge pages of ``/dev/shm``, and what stays mapped after an iov has ended."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from support.processes import wait_until
from support.python_child import module_command, suites_environ
from support.raw_usrbio import AgentProcess

from gdrkit import pattern, usrbio
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.units import MIB

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence

pytestmark = needs(verbs.nic())


def mapped_bytes(process_id: int | str) -> int:
    """Return the bytes of address space that a process has mapped."""
    fields = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in fields if line.startswith("VmSize:"))


def ignore_block(_block: memoryview, _offset_bytes: int) -> None:
    """Do nothing with a block that was read."""


def test_read_file_leaves_little_memory_mapped(tmp_path: Path, evidence: Evidence) -> None:
    path = tmp_path / "file"
    path.write_bytes(pattern.payload(64 * MIB + 1, seed=5))
    with AgentProcess(tmp_path) as agent:
        # The first call starts threads, whose stacks stay mapped.
        usrbio.read_file(path, str(tmp_path), block_size=MIB, cb=ignore_block)
        before_bytes = {process: mapped_bytes(process) for process in ("self", agent.process.pid)}
        for _ in range(8):
            assert usrbio.read_file(path, str(tmp_path), block_size=64 * MIB, cb=ignore_block) is None

        def added_bytes() -> int:
            added = [mapped_bytes(process) - size_bytes for process, size_bytes in before_bytes.items()]
            evidence["added_bytes"] = added
            return max(added)

        wait_until(lambda: added_bytes() < 64 * MIB, "client and agent unmap the memory", timeout_s=10)
        assert agent.terminate() == 0, agent.error_output


@needs(host.program("unshare", "--user", "--map-root-user", "--mount", "echo", "allowed"))
def test_huge_pages_of_the_file_system_are_used(tmp_path: Path) -> None:
    length_bytes = 64 * MIB
    completed = subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            *module_command("usrbio.huge_page_iov", tmp_path, length_bytes),
        ],
        env=suites_environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout) == {"client": length_bytes, "agent": length_bytes}
