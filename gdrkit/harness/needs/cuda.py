"""Needs about CUDA devices: a number of devices, and attributes of devices.

A need of an attribute is met only if all devices have the attribute, because a case may use any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.harness.needs.base import Need, reason_without_facts
from gdrkit.registration import FlushOption, WriteVisibility

if TYPE_CHECKING:
    from gdrkit.inventory import Facts

__all__ = ["device", "dmabuf_export", "flush", "ipc", "ordered_writes", "vmm"]


@dataclass(frozen=True, slots=True)
class _Device:
    count_min: int

    @property
    def name(self) -> str:
        return f"cuda.device(count_min={self.count_min})"

    def check(self, facts: Facts) -> str | None:
        if facts.cuda is None:
            return reason_without_facts("cuda", facts.cuda_failure)
        device_count = len(facts.cuda.devices)
        return None if device_count >= self.count_min else f"{self.count_min} CUDA devices needed, {device_count} found"


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
        missing_texts = [
            f"device {cuda_device.index} has no {attribute}"
            for cuda_device in facts.cuda.devices
            for attribute in self.attributes
            if not cuda_device.has(attribute)
        ]
        return "; ".join(missing_texts) or None


@dataclass(frozen=True, slots=True)
class _Flush:
    option: FlushOption

    @property
    def name(self) -> str:
        return f"cuda.flush({self.option.name})"

    def check(self, facts: Facts) -> str | None:
        if facts.cuda is None:
            return reason_without_facts("cuda", facts.cuda_failure)
        if not facts.cuda.devices:
            return "no CUDA device"
        return next(
            (
                f"device {cuda_device.index} has no flush option {self.option.name}"
                for cuda_device in facts.cuda.devices
                if not self.option & cuda_device.attributes.get("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", 0)
            ),
            None,
        )


@dataclass(frozen=True, slots=True)
class _OrderedWrites:
    name = "cuda.ordered_writes"

    def check(self, facts: Facts) -> str | None:
        if facts.cuda is None:
            return reason_without_facts("cuda", facts.cuda_failure)
        if not facts.cuda.devices:
            return "no CUDA device"
        return next(
            (
                f"device {cuda_device.index} sees writes of NICs only after a flush"
                for cuda_device in facts.cuda.devices
                if cuda_device.attributes.get("GPU_DIRECT_RDMA_WRITES_ORDERING", 0) < WriteVisibility.OWNER
            ),
            None,
        )


def device(*, count_min: int = 1) -> Need:
    """Return the need of at least `count_min` CUDA devices."""
    return _Device(count_min)


def flush(option: FlushOption) -> Need:
    """Return the need that each device can flush the writes of NICs by the flush option `option`."""
    return _Flush(option)


# This need is met if each device sees the writes of NICs to its memory without a flush.
ordered_writes: Need = _OrderedWrites()
dmabuf_export: Need = _Attributes("dmabuf_export", ("DMA_BUF_SUPPORTED",))
# CUDA has no attribute for legacy IPC (cuIpcGetMemHandle). On Linux, every device with unified addressing supports it.
ipc: Need = _Attributes("ipc", ("UNIFIED_ADDRESSING",))
vmm: Need = _Attributes("vmm", ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"))
