"""close() of a FUSE agent after a failed unmount, and fuse_agent() with wrong arguments.

The close() whose unmount fails raises ApiError. A second close() unmounts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import UsageError
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.usrbio.fuse.agent import fuse_agent

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs(host.fuse, verbs.nic())
# During the first close, PATH has no program that unmounts. For this close, the program prints the operation and the
# reason of the error, and whether the folder is still mounted. For the second close, it prints whether the folder is
# still mounted, and the kinds of the open objects.
TWO_CLOSES_PROGRAM = """
import json, os, sys
from pathlib import Path
from gdrkit import handles
from gdrkit.errors import ApiError
from gdrkit.usrbio.fuse.agent import fuse_agent
mount, store, empty_folder = map(Path, sys.argv[1:])
search_path = os.environ["PATH"]
agent = fuse_agent(mount, store=store)
os.environ["PATH"] = str(empty_folder)
def is_mounted():
    return any(f" {mount} " in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
try:
    agent.close()
except ApiError as error:
    first_result = [error.operation, error.reason.value, is_mounted()]
os.environ["PATH"] = search_path
agent.close()
print(json.dumps({"first": first_result, "second": [is_mounted(), list(handles.live())]}))
"""


def test_close_after_a_failed_unmount_unmounts(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("mount", "store", "empty")]
    for path in paths:
        path.mkdir()
    command = [
        sys.executable,
        "-c",
        TWO_CLOSES_PROGRAM,
        *map(str, paths),
    ]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert completed.returncode == 0, completed.stderr
    close_results = json.loads(completed.stdout)
    assert close_results["first"] == ["umount", "busy", True]
    assert close_results["second"] == [False, []]


@pytest.mark.parametrize("given_names", [("store", "server"), ()], ids=["both", "neither"])
def test_agent_needs_either_a_store_or_a_server(tmp_path: Path, given_names: tuple[str, ...]) -> None:
    store = tmp_path / "store"
    for folder in (store, tmp_path / "mount"):
        folder.mkdir()
    with pytest.raises(UsageError, match="either a store or a server"):
        fuse_agent(
            tmp_path / "mount",
            store=store if "store" in given_names else None,
            server="127.0.0.1:1" if "server" in given_names else None,
        ).close()
    assert list(store.iterdir()) == []
