"""If no direct path is proven, the copy engine reads uncached bytes by O_DIRECT, and one warning names the cause."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import pytest
from support import udev
from support.gds import drop_from_cache

from gdrkit import gds, pattern
from gdrkit.errors import Reason, Unsupported
from gdrkit.gds import direct
from gdrkit.harness.needs import cuda, needs
from gdrkit.harness.needs.cufile import find_udev_entry
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gdrkit.cuda import CudaMemory, Device

pytestmark = needs(cuda.device())


@pytest.fixture
def path(tmp_path: Path, seed: int) -> Iterator[Path]:
    """Yield the path of a file of 8 MiB."""
    data_path = tmp_path / "file"
    data_path.write_bytes(pattern.payload(8 * MIB, seed=seed))
    with contextlib.ExitStack() as stack:
        if find_udev_entry(tmp_path) is None:
            # A test run in parallel may write an entry into the database of udev for a short time, which would change
            # the cause of the fallback. remove_entry() holds a lock against that.
            stack.enter_context(udev.remove_entry(tmp_path))
        yield data_path


@pytest.fixture(autouse=True)
def forget_reported_causes() -> Iterator[None]:
    """Forget the causes that a warning has reported, so that each case gets the warnings again."""
    direct.forget_warnings()
    yield
    direct.forget_warnings()


def test_fallback_warns_once_and_reads_by_o_direct(path: Path, seed: int, device: Device) -> None:
    with device.allocate(8 * MIB) as memory:
        with gds.File(path) as file:
            drop_from_cache(path)
            cached_share = file.cached_share()
            with pytest.warns(gds.FallbackWarning) as caught_warnings:
                result = file.read_into(memory)
            assert len(caught_warnings) == 1
            assert result.route is gds.Route.ENGINE
            assert result.why_not_direct
            assert result.why_not_direct in str(caught_warnings[0].message)
            # A file on tmpfs stays in the cache (share 1.0). If only a part of the file is cached, the number of direct
            # bytes is not predictable.
            direct_bytes_min, direct_bytes_max = {0.0: (8 * MIB, 8 * MIB), 1.0: (0, 0)}.get(cached_share, (0, 8 * MIB))
            assert direct_bytes_min <= result.direct_io_bytes <= direct_bytes_max
            pattern.check(memory.read(), seed=seed)
        with gds.File(path) as file, warnings.catch_warnings():
            warnings.simplefilter("error")
            # A second warning for the same cause would be an error here. Every result has the cause.
            for length_bytes in (4 * KIB, 8 * MIB):
                assert file.read_into(memory, length_bytes=length_bytes).why_not_direct == result.why_not_direct


def test_fallback_warning_names_the_line_of_the_caller(path: Path, device: Device) -> None:
    ranges = [(0, 4 * KIB)]
    calls: tuple[Callable[[gds.File, CudaMemory], object], ...] = (
        lambda file, memory: file.read_into(memory),
        lambda file, memory: file.write_from(memory),
        lambda file, memory: file.start_write_from(memory).result(),
        lambda file, memory: file.readv(memory, ranges),
        lambda file, memory: file.start_writev(memory, ranges).result(),
    )
    with device.allocate(4 * KIB) as memory:
        for call in calls:
            direct.forget_warnings()
            with gds.File(path, "r+") as file, pytest.warns(gds.FallbackWarning) as caught_warnings:
                call(file, memory)
            warning_lines = [(warning.filename, warning.lineno) for warning in caught_warnings]
            assert warning_lines == [(__file__, call.__code__.co_firstlineno)]


def test_required_direct_path_error_has_the_cause(path: Path, device: Device) -> None:
    with device.allocate(8 * MIB) as memory, gds.File(path, "r+", direct="required") as file:
        memory.fill(0xA5)
        for call in (file.read_into, file.write_from, file.start_read_into):
            with pytest.raises(Unsupported) as error_info:
                call(memory, length_bytes=4 * KIB)
            assert error_info.value.reason is Reason.NOT_DIRECT
            assert error_info.value.detail
        with pytest.raises(Unsupported):
            file.read_into(bytearray(10))
        assert set(memory.read()) == {0xA5}


def test_never_direct_gives_no_warning(path: Path, device: Device) -> None:
    with device.allocate(8 * MIB) as memory, gds.File(path, direct="never") as file:
        assert file.read_into(memory).why_not_direct == ""
    with gds.File(path) as file:
        assert file.read_into(bytearray(8 * MIB)).why_not_direct == ""
