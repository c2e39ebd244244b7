"""A file in /var/tmp is read into the memory of each CUDA device. The report shows the route by device and mount."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gdrkit import gds, pattern
from gdrkit.harness.needs import cuda, needs
from gdrkit.harness.needs.cufile import DISK_FOLDER
from gdrkit.host import HostTree, mount_of, mounts
from gdrkit.units import MIB

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence


@needs(cuda.device())
@pytest.mark.qualify
def test_file_is_read_into_every_device_with_its_route(
    devices: tuple[Device, ...], evidence: Evidence, seed: int
) -> None:
    """Read all bytes. For the table of routes in the report, record the route, and why the route is not direct."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-gds-", dir=DISK_FOLDER) as folder:
        path = Path(folder).resolve() / "data"
        path.write_bytes(pattern.payload(MIB, seed=seed))
        mount = mount_of(mounts(HostTree()), str(path))
        # In a chroot, /proc/self/mounts may have no line for the root folder, so there is no mount.
        mount_point = mount.mount_point if mount else "/"
        for device in devices:
            with device.allocate(MIB) as memory, warnings.catch_warnings():
                warnings.simplefilter("ignore", gds.FallbackWarning)
                with gds.File(path) as file:
                    result = file.read_into(memory)
                pattern.check(memory.read(), seed=seed)
            why_not_direct = result.why_not_direct or None
            evidence.file(device=device, mount=mount_point, route=result.route, fallback_cause=why_not_direct)
