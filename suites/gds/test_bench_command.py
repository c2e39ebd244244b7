"""The command ``gdrkit bench storage``: the measured points, the substrate, and a plot that needs no other file."""

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

# ElementTree puts this prefix before the name of each SVG element.
SVG_NAMESPACE = "{http://www.w3.org/2000/svg}"


def list_file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run_bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command with files of 4 MiB (--size 4), and measure each point for the shortest time (--seconds 0)."""
    command = [sys.executable, "-m", "gdrkit", "bench", "storage", "--size", "4", "--seconds", "0"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize("options", [["--host"], pytest.param([], marks=needs(cuda.device()))], ids=["host", "device"])
def test_bench_measures_every_point_and_leaves_no_file(tmp_path: Path, options: list[str]) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    process = run_bench("--folder", folder, "--json", "--plot", tmp_path / "plot.html", "--direct", "never", *options)
    assert (process.returncode, process.stderr) == (0, "")
    output = json.loads(process.stdout)
    sizes = [4 * KIB, 64 * KIB, MIB, 4 * MIB]
    assert [(point["kind"], point["size_bytes"]) for point in output["points"]] == [
        (kind, size_bytes) for kind in KINDS for size_bytes in sizes
    ]
    for point in output["points"]:
        assert point["transfers_count"] >= 1
        assert point["routes"] == ["engine"]
        assert point["rate_gb_per_s"] > 0
        assert point["operations_per_s"] * point["size_bytes"] == pytest.approx(point["rate_gb_per_s"] * 1e9)
    assert output["substrate"].get("cuda") in ({None} if options else {"twin", "hardware"})
    assert list_file_names(folder) == []
    plot_html = (tmp_path / "plot.html").read_text()
    for kind in KINDS:
        assert f">{kind}<" in plot_html
    # The plot refers to no other file. If the rates were measured on twins (libraries that emulate the
    # hardware), the plot says so.
    assert "http" not in plot_html.replace("http://www.w3.org/2000/svg", "")
    assert ("the rates do not describe this machine" in plot_html) == (output["substrate"].get("cuda") == "twin")


@needs(cuda.device())
def test_bench_prints_no_rates_of_a_twin(tmp_path: Path) -> None:
    process = run_bench("--folder", tmp_path, "--direct", "never")
    assert process.returncode == 0
    assert "durable write" in process.stdout
    # On the twin, the table has "-" in place of the rates.
    is_twin = "the rates do not describe this machine" in process.stdout
    rows = [line.split() for line in process.stdout.splitlines() if "cached read" in line]
    assert {"-" in row for row in rows} == {is_twin}


@pytest.mark.parametrize(
    ("options", "error_text"),
    [
        (["--plot", "plot.png"], "must end in .html or .svg"),
        (["--folder", "none"], "none"),
        (["--size", "0"], "0"),
    ],
)
def test_invalid_bench_arguments_exit_with_2(options: list[str], error_text: str) -> None:
    process = run_bench("--host", *options)
    assert process.returncode == 2
    assert error_text in process.stderr


def test_plot_has_each_point_at_its_height(tmp_path: Path) -> None:
    lines = [Line("slow & <steady>", [(4 * KIB, 1.0), (MIB, 2.0)]), Line("fast", [(4 * KIB, 4.0), (MIB, 8.0)])]
    plot = Plot(title="Title", note="note", unit="GB/s", lines=lines)
    svg_root = ET.fromstring(draw(plot))  # noqa: S314 - the text was written by this program.
    circles = {
        circle.findtext(f"{SVG_NAMESPACE}title"): circle
        for circle in svg_root.iter(f"{SVG_NAMESPACE}circle")
        if len(circle)
    }
    y_by_title = {title: float(circle.get("cy", "")) for title, circle in circles.items()}
    assert list(y_by_title) == [
        "slow & <steady>, 4 KiB: 1",
        "slow & <steady>, 1 MiB: 2",
        "fast, 4 KiB: 4",
        "fast, 1 MiB: 8",
    ]
    # A circle with twice the rate is twice as high above the axis. The y coordinates of SVG grow downwards.
    y_values = list(y_by_title.values())
    assert y_values == sorted(y_values, reverse=True)
    # The first two rates are 1 and 2. So the first circle is halfway between the axis and the second circle.
    axis_y = 2 * y_values[0] - y_values[1]
    assert [round((axis_y - y) / (axis_y - y_values[0]), 3) for y in y_values] == [1, 2, 4, 8]
    write_plot(tmp_path / "plot.svg", plot)
    assert (tmp_path / "plot.svg").read_text() == draw(plot)
    with pytest.raises(UsageError):
        draw(Plot(title="", note="", unit="", lines=[]))
