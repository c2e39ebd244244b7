"""A FUSE mount on a machine without /dev/fuse fails with ENODEV."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from gdrkit.harness.needs import host, needs

if TYPE_CHECKING:
    from pathlib import Path

# The machine itself has FUSE, so that the hidden /dev/fuse is the only obstacle.
pytestmark = needs(host.fuse, host.program("unshare", "--user", "--map-root-user", "--mount", "echo", "allowed"))
MOUNT_PROGRAM = """
import errno, sys
from pathlib import Path
from gdrkit.errors import SetupMissing
from gdrkit.usrbio.fuse.mount import FuseMount
try:
    FuseMount(Path(sys.argv[1]), store=None, link_clients=None, agent_folder=Path(sys.argv[1]))
except SetupMissing as error:
    print(errno.errorcode[error.errno], error.reason.value)
"""


def test_machine_without_dev_fuse_is_enodev(tmp_path: Path) -> None:
    # This /dev of a new mount namespace has only the null device, which the search for libraries needs.
    script = """set -e
mount -t tmpfs none /mnt
touch /mnt/null
mount --bind /dev/null /mnt/null
mount --rbind /mnt /dev
exec "$@" """
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    completed = subprocess.run(
        [*command, sys.executable, "-c", MOUNT_PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert completed.stdout.split() == ["ENODEV", "no_device"], completed.stderr
