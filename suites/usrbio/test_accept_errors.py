"""The usrbio agent logs a failed accept(), tries again, and serves the waiting client and the next client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.failing_calls import STRACE, fail_next_call
from support.raw_usrbio import AgentProcess, RawClient

from gdrkit.harness.needs import needs, verbs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs(STRACE, verbs.nic())


def test_agent_accepts_again_after_an_unexpected_error(tmp_path: Path) -> None:
    with AgentProcess(tmp_path) as agent:
        with fail_next_call(agent.process.pid, "accept4", "EPROTO"), RawClient(tmp_path) as client:
            client.hello()
        with RawClient(tmp_path) as client:
            client.hello()
        assert agent.terminate() == 0
    assert "Protocol error" in agent.error_output
