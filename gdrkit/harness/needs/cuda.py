"""Needs about CUDA devices.

The driver reports flags for each device. A need of a flag requires it of all devices, because a case may use any of
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.harness.needs.base import Need, reason_without_facts

if TYPE_CHECKING:
    from gdrkit.inventory import Facts

__all__ = ["device", "dmabuf_export", "ipc", "vmm"]


@dataclass(frozen=True, slots=True)
class _Device:
    count_min: int

    @property
    def name(self) -> str:
        return f"cuda.device(count_min={self.count_min})"

    def check(self, facts: Facts) -> str | None:
        if facts.cuda is None:
            return reason_without_facts("cuda", facts.cuda_failure)
        found = len(facts.cuda.devices)
        return None if found >= self.count_min else f"{self.count_min} CUDA devices needed, {found} found"


@dataclass(frozen=True, slots=True)
class _Attributes:
    short_name: str
    attributes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"cuda.{self.short_name}"

    def check(self, facts: Facts) -> str | None:
        if facts.cuda is None:
            return reason_without_facts("cuda", facts.cuda_failure)
        if not facts.cuda.devices:
            return "no CUDA device"
        missing = [
            f"device {each.index} has no {attribute}"
            for each in facts.cuda.devices
            for attribute in self.attributes
            if not each.has(attribute)
        ]
        return "; ".join(missing) or None


def device(*, count_min: int = 1) -> Need:
    """Return the need of at least `count_min` CUDA devices."""
    return _Device(count_min)


dmabuf_export: Need = _Attributes("dmabuf_export", ("DMA_BUF_SUPPORTED",))
# Legacy IPC has no flag. On Linux, every device with unified addressing supports it.
ipc: Need = _Attributes("ipc", ("UNIFIED_ADDRESSING",))
vmm: Need = _Attributes("vmm", ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"))
