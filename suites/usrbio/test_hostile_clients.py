"""A usrbio client that corrupts the memory that it shares with the agent does not affect other clients.

An honest client executes operations during each attack. GDRKIT_HONEST_OPERATIONS is the number of its operations.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from support.python_child import module_command, suites_environ
from support.raw_usrbio import AgentProcess
from usrbio.hostile_client import ATTACKS

from gdrkit import pattern
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence

pytestmark = needs(verbs.nic())

OPERATION_COUNT = int(os.environ.get("GDRKIT_HONEST_OPERATIONS", "4000"))
# The limit allows 10 ms per operation. Operations are slow, because each attack ends the agent's session with the
# server, and a new session takes some 30 ms.
TIMEOUT_S = 120 + OPERATION_COUNT / 100


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_attack_by_shared_memory_hurts_no_other_client(
    attack: str, tmp_path: Path, seed: int, evidence: Evidence
) -> None:
    (tmp_path / "input").write_bytes(pattern.payload(MIB, seed=seed))
    command = module_command("usrbio.hostile_client", tmp_path, attack)
    with (
        AgentProcess(tmp_path) as agent,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=suites_environ()
        ) as attacker,
    ):
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        try:
            assert attacker.stdout.readline() == "attacks\n"
            honest_client = subprocess.run(
                module_command("usrbio.verifying_client", tmp_path, OPERATION_COUNT),
                capture_output=True,
                text=True,
                check=False,
                env=suites_environ(),
                timeout=TIMEOUT_S,
            )
            output, _ = attacker.communicate(input="\n", timeout=60)
            attack_count = int(output.split()[-1])
        finally:
            attacker.kill()
        assert honest_client.returncode == 0, honest_client.stderr
        honest_statistics = json.loads(honest_client.stdout)
        assert honest_statistics["failed"] == {}
        assert honest_statistics["wrong_bytes"] == 0
        assert honest_statistics["operations"] >= OPERATION_COUNT
        assert attacker.returncode == 0
        assert attack_count > 0
        assert agent.terminate() == 0, agent.error_output
    evidence.number("attacks_count", attack_count)
    evidence["honest_client"] = honest_statistics
    evidence["agent"] = agent.statistics
