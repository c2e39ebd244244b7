"""If no direct path is proven, the copy engine reads uncached bytes by O_DIRECT, and one warning names the cause."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import pytest
from support import udev
from support.gds import forget

from gdrkit import gds, pattern
from gdrkit.errors import Reason, Unsupported
from gdrkit.gds import direct
from gdrkit.harness.needs import cuda, needs
from gdrkit.harness.needs.cufile import entry_of
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.cuda import Device

pytestmark = needs(cuda.device())


@pytest.fixture
def path(tmp_path: Path, seed: int) -> Iterator[Path]:
    file = tmp_path / "file"
    file.write_bytes(pattern.payload(8 * MIB, seed=seed))
    with contextlib.ExitStack() as stack:
        if entry_of(tmp_path) is None:
            # A concurrent test run may write an entry of udev's database for a short time, which changes the cause.
            stack.enter_context(udev.absent(tmp_path))
        yield file


@pytest.fixture(autouse=True)
def no_reported_causes() -> Iterator[None]:
    """Reset the list of causes that were reported by a warning."""
    direct.forget_warnings()
    yield
    direct.forget_warnings()


def test_fallback_warns_once_and_reads_by_o_direct(path: Path, seed: int, device: Device) -> None:
    with device.allocate(8 * MIB) as memory:
        with gds.File(path) as file:
            forget(path)
            share = file.cached_share()
            with pytest.warns(gds.FallbackWarning) as caught:
                result = file.read_into(memory)
            assert len(caught) == 1
            assert result.route is gds.Route.ENGINE
            assert result.why_not_direct
            assert result.why_not_direct in str(caught[0].message)
            # A file system in memory stays cached. If only a part stayed cached, the number is not predictable.
            least, most = {0.0: (8 * MIB, 8 * MIB), 1.0: (0, 0)}.get(share, (0, 8 * MIB))
            assert least <= result.direct_io_bytes <= most
            pattern.check(memory.read(), seed=seed)
        with gds.File(path) as file, warnings.catch_warnings():
            warnings.simplefilter("error")
            # The warning comes once for each cause. Every result repeats the cause.
            for length in (4 * KIB, 8 * MIB):
                assert file.read_into(memory, length_bytes=length).why_not_direct == result.why_not_direct


def test_required_direct_path_error_has_the_cause(path: Path, device: Device) -> None:
    with device.allocate(8 * MIB) as memory, gds.File(path, "r+", direct="required") as file:
        memory.fill(0xA5)
        for call in (file.read_into, file.write_from, file.start_read_into):
            with pytest.raises(Unsupported) as raised:
                call(memory, length_bytes=4 * KIB)
            assert raised.value.reason is Reason.NOT_DIRECT
            assert raised.value.detail
        with pytest.raises(Unsupported):
            file.read_into(bytearray(10))
        assert set(memory.read()) == {0xA5}


def test_never_direct_gives_no_warning(path: Path, device: Device) -> None:
    with device.allocate(8 * MIB) as memory, gds.File(path, direct="never") as file:
        assert file.read_into(memory).why_not_direct == ""
    with gds.File(path) as file:
        assert file.read_into(bytearray(8 * MIB)).why_not_direct == ""
