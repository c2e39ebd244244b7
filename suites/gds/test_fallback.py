"""Where no direct path is proven the copy engine moves the bytes: by O_DIRECT from the disk, and with one warning."""

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
    found = tmp_path / "file"
    found.write_bytes(pattern.payload(8 * MIB, seed=seed))
    with contextlib.ExitStack() as stack:
        if entry_of(tmp_path) is None:
            # What runs beside this may write an entry for a moment, and the cause would be another one.
            stack.enter_context(udev.absent(tmp_path))
        yield found


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    direct.forget_warnings()
    yield
    direct.forget_warnings()


def test_one_warning_names_the_cause_and_the_disk_is_read_past_the_page_cache(
    path: Path, seed: int, device: Device
) -> None:
    with device.allocate(8 * MIB) as memory:
        with gds.File(path) as file:
            forget(path)
            share = file.cached_share()
            with pytest.warns(gds.FallbackWarning) as said:
                done = file.read_into(memory)
            assert len(said) == 1
            assert done.route is gds.Route.ENGINE
            assert done.why_not_direct
            assert done.why_not_direct in str(said[0].message)
            # A file system in memory cannot forget; where a part stayed cached, either is right for some.
            least, most = {0.0: (8 * MIB, 8 * MIB), 1.0: (0, 0)}.get(share, (0, 8 * MIB))
            assert least <= done.direct_io_bytes <= most
            pattern.check(memory.read(), seed=seed)
        with gds.File(path) as file, warnings.catch_warnings():
            warnings.simplefilter("error")
            # Said once for each cause; the result still says it.
            for length in (4 * KIB, 8 * MIB):
                assert file.read_into(memory, length_bytes=length).why_not_direct == done.why_not_direct


def test_who_asks_for_a_direct_path_gets_the_cause_instead_of_a_fallback(path: Path, device: Device) -> None:
    with device.allocate(8 * MIB) as memory, gds.File(path, "r+", direct="required") as file:
        memory.fill(0xA5)
        for call in (file.read_into, file.write_from, file.start_read_into):
            with pytest.raises(Unsupported) as refused:
                call(memory, length_bytes=4 * KIB)
            assert refused.value.reason is Reason.NOT_DIRECT
            assert refused.value.detail
        with pytest.raises(Unsupported):
            file.read_into(bytearray(10))
        assert set(memory.read()) == {0xA5}


def test_who_wants_none_is_told_nothing(path: Path, device: Device) -> None:
    with device.allocate(8 * MIB) as memory, gds.File(path, direct="never") as file:
        assert file.read_into(memory).why_not_direct == ""
    target = bytearray(8 * MIB)
    with gds.File(path) as file:
        assert file.read_into(target).why_not_direct == ""
