"""``gdrkit bench storage``: each point, the substrate of the run, and a plot without references to other files."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from gdrkit.errors import UsageError
from gdrkit.gds.speed import KINDS
from gdrkit.harness.needs import cuda, needs
from gdrkit.report.plot import Line, Plot, draw, write_plot
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gdrkit", "bench", "storage", "--size", "4", "--seconds", "0"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize("options", [["--host"], pytest.param([], marks=needs(cuda.device()))], ids=["host", "device"])
def test_bench_measures_every_point_and_leaves_no_file(tmp_path: Path, options: list[str]) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    process = bench("--folder", folder, "--json", "--plot", tmp_path / "plot.html", "--direct", "never", *options)
    assert (process.returncode, process.stderr) == (0, "")
    output = json.loads(process.stdout)
    sizes = [4 * KIB, 64 * KIB, MIB, 4 * MIB]
    assert [(each["kind"], each["size_bytes"]) for each in output["points"]] == [
        (kind, size) for kind in KINDS for size in sizes
    ]
    for each in output["points"]:
        assert each["transfers_count"] >= 1
        assert each["routes"] == ["engine"]
        assert each["rate_gb_per_s"] > 0
        assert each["operations_per_s"] * each["size_bytes"] == pytest.approx(each["rate_gb_per_s"] * 1e9)
    assert output["substrate"].get("cuda") in ({None} if options else {"twin", "hardware"})
    assert names(folder) == []
    plot = (tmp_path / "plot.html").read_text()
    for kind in KINDS:
        assert f">{kind}<" in plot
    # The plot refers to no other file, and states if its rates are not those of the machine.
    assert "http" not in plot.replace("http://www.w3.org/2000/svg", "")
    assert ("no performance of this machine" in plot) == (output["substrate"].get("cuda") == "twin")


@needs(cuda.device())
def test_bench_prints_no_rates_of_a_twin(tmp_path: Path) -> None:
    process = bench("--folder", tmp_path, "--direct", "never")
    assert process.returncode == 0
    assert "durable write" in process.stdout
    is_twin = "no performance of this machine" in process.stdout
    rows = [line.split() for line in process.stdout.splitlines() if "cached read" in line]
    assert {"-" in row for row in rows} == {is_twin}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--plot", "plot.png"], "must end in .html or .svg"),
        (["--folder", "none"], "none"),
        (["--size", "0"], "0"),
    ],
)
def test_invalid_bench_arguments_exit_with_2(options: list[str], text: str) -> None:
    process = bench("--host", *options)
    assert process.returncode == 2
    assert text in process.stderr


def test_plot_has_each_point_at_its_height(tmp_path: Path) -> None:
    lines = [Line("slow & <steady>", [(4 * KIB, 1.0), (MIB, 2.0)]), Line("fast", [(4 * KIB, 4.0), (MIB, 8.0)])]
    plot = Plot(title="Title", note="note", unit="GB/s", lines=lines)
    root = ET.fromstring(draw(plot))  # noqa: S314 - the text was written by this program.
    points = {each.findtext(f"{SVG}title"): each for each in root.iter(f"{SVG}circle") if len(each)}
    heights = {title: float(each.get("cy", "")) for title, each in points.items()}
    assert list(heights) == [
        "slow & <steady>, 4 KiB: 1",
        "slow & <steady>, 1 MiB: 2",
        "fast, 4 KiB: 4",
        "fast, 1 MiB: 8",
    ]
    # Twice the rate is twice as high above the axis.
    values = list(heights.values())
    assert values == sorted(values, reverse=True)
    zero = 2 * values[0] - values[1]
    assert [round((zero - each) / (zero - values[0]), 3) for each in values] == [1, 2, 4, 8]
    write_plot(tmp_path / "plot.svg", plot)
    assert (tmp_path / "plot.svg").read_text() == draw(plot)
    with pytest.raises(UsageError):
        draw(Plot(title="", note="", unit="", lines=[]))
