"""Every folder of the suites about transfers or about the machine has a case that `gdrkit qualify` runs.

suites/README.md lists these cases. test_readmes.py checks that its list is complete.
"""

from __future__ import annotations

import re
from pathlib import Path

SUITES = Path(__file__).resolve().parents[1]
# The folders of the suites about transfers or about the machine.
REQUIRED_FOLDERS = {
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
    listed_folders = re.findall(r"^- `(\w+)/\S+::\S+`$", (SUITES / "README.md").read_text(), re.MULTILINE)
    assert REQUIRED_FOLDERS - set(listed_folders) == set()
