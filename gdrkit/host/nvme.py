"""NVMe controllers, from /sys/class/nvme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["NvmeController", "nvme_controllers"]

_CONTROLLERS_FOLDER = "/sys/class/nvme"


@dataclass(frozen=True, slots=True)
class NvmeController:
    """An NVMe controller: name, model, transport (``pcie``, ``rdma``, ``tcp``, ...) and PCI address, if it has one."""

    name: str
    model: str | None
    transport: str | None
    pci_address: str | None


def nvme_controllers(tree: HostTree) -> tuple[NvmeController, ...]:
    """Return every NVMe controller, by name."""
    return tuple(
        NvmeController(
            name=name,
            model=tree.text(f"{_CONTROLLERS_FOLDER}/{name}/model"),
            transport=transport,
            pci_address=tree.link_name(f"{_CONTROLLERS_FOLDER}/{name}/device") if transport in (None, "pcie") else None,
        )
        for name in tree.names(_CONTROLLERS_FOLDER)
        for transport in [tree.text(f"{_CONTROLLERS_FOLDER}/{name}/transport")]
    )
