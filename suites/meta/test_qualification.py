"""Every folder of the suites that is about transfers or about the machine has a case in a qualification."""

from __future__ import annotations

import re
from pathlib import Path

SUITES = Path(__file__).resolve().parents[1]
FOLDERS = {
    "contract",
    "cufile",
    "fault",
    "gaudi",
    "gds",
    "inventory",
    "rdma",
    "registration",
    "review",
    "share",
    "storage",
    "tiers",
    "usrbio",
}


def test_every_transfer_folder_is_in_a_qualification() -> None:
    listed = re.findall(r"^- `(\w+)/\S+::\S+`$", (SUITES / "README.md").read_text(), re.MULTILINE)
    assert FOLDERS - set(listed) == set()
