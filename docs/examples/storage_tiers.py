"""Storage tiers: logical names, migration of files that are used often, pins, and a check of the catalogue."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gdrkit.tiers import TierManager, configure

with tempfile.TemporaryDirectory() as parent_folder:
    folders = {tier: Path(parent_folder) / tier for tier in ("nvme", "hdd")}
    for folder in folders.values():
        folder.mkdir()
    configuration = configure(tiers=[f"{tier}={folder}" for tier, folder in folders.items()], environ={})
    with TierManager(configuration) as tiers:
        tiers.write_from("run-7/weights", b"weights of a model")
        # A hundred reads make the file hot, so auto_tier() moves it to the faster tier.
        for _ in range(100):
            with tiers.open("run-7/weights") as file:
                assert file.read_into(bytearray(9)).bytes == 9
        print("in", tiers.find("run-7/weights").tier, "- moved to", tiers.auto_tier("run-7/weights"))
        tiers.pin("run-7/weights", "nvme")
        for status in tiers.status():
            print(status.name, status.files, "files,", status.size_bytes, "bytes, route", status.route.state)
        assert tiers.check() == []
