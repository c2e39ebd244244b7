r"""Comparison of the settings of the copy engine: prints a table that shows the best defaults for this machine.

A run takes less than two minutes and 6 GB of disk:

    pytest -c suites/pytest.ini suites/bench/test_storage_sweep.py --benchmark-enable -s --records FILE

Without ``--benchmark-enable``, each kind of transfer runs once with two settings and a small file.
The environment variable GDRKIT_BENCH_STORAGE_MIB sets the size of the file, and GDRKIT_BENCH_STORAGE_FOLDER sets its
folder.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bench.storage_speed import check_all_bytes, create_random_file, log_progress
from bench.storage_sweep import TIME_LIMITS_S, Sweep, format_table

from gdrkit.harness.needs import cuda, needs
from gdrkit.units import MIB

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence

pytestmark = [needs(cuda.device()), pytest.mark.timeout(300)]


def test_copy_engine_settings_in_one_table(
    request: pytest.FixtureRequest, device: Device, tmp_path: Path, evidence: Evidence
) -> None:
    is_measured = bool(request.config.getoption("--benchmark-enable"))
    length_bytes = int(os.environ.get("GDRKIT_BENCH_STORAGE_MIB", "4096" if is_measured else "16")) * MIB
    folder = Path(os.environ.get("GDRKIT_BENCH_STORAGE_FOLDER", tmp_path)) / "storage_sweep"
    folder.mkdir(parents=True)
    try:
        source = folder / "file"
        create_random_file(source, length_bytes)
        with device.allocate(length_bytes) as memory:
            rows = Sweep(source, device, memory, time_factor=float(is_measured)).run()
            # The last engine read the first half of the file. The readers without an engine do not write to this
            # memory.
            check_all_bytes(memory, source, length_bytes=length_bytes // 2)
    finally:
        shutil.rmtree(folder)
    assert {row.kind for row in rows} == TIME_LIMITS_S.keys()
    for line in format_table(rows):
        log_progress(line)
    for row in (row for row in rows if is_measured and row.rates_gb_per_s):
        evidence[f"{row.kind}: {row.setting}"] = {
            "rates_gb_per_s": row.rates_gb_per_s,
            "cpu_s_per_gib": row.cpu_s_per_gib,
        }
        kind = row.kind.replace(" ", "_")
        if row.setting == "default":
            evidence.number(f"{kind}_gb_per_s_median", row.rate_gb_per_s)
        elif row.is_engine and row.rate_gb_per_s == max(
            row_of_kind.rate_gb_per_s for row_of_kind in rows if row_of_kind.kind == row.kind and row_of_kind.is_engine
        ):
            evidence[f"{kind}_best"] = row.setting
            evidence.number(f"{kind}_best_gb_per_s_median", row.rate_gb_per_s)
