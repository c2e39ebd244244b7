"""gdrkit bench storage: each point, what it ran on, and a picture that needs nothing else."""

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
def test_every_point_is_measured_and_nothing_is_left(tmp_path: Path, options: list[str]) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    done = bench("--folder", folder, "--json", "--plot", tmp_path / "plot.html", "--direct", "never", *options)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    sizes = [4 * KIB, 64 * KIB, MIB, 4 * MIB]
    assert [(each["kind"], each["size_bytes"]) for each in answer["points"]] == [
        (kind, size) for kind in KINDS for size in sizes
    ]
    for each in answer["points"]:
        assert each["transfers_count"] >= 1
        assert each["routes"] == ["engine"]
        assert each["rate_gb_per_s"] > 0
        assert each["operations_per_s"] * each["size_bytes"] == pytest.approx(each["rate_gb_per_s"] * 1e9)
    assert answer["substrate"].get("cuda") in ({None} if options else {"twin", "hardware"})
    assert names(folder) == []
    picture = (tmp_path / "plot.html").read_text()
    for kind in KINDS:
        assert f">{kind}<" in picture
    # It needs nothing else, and says it where its numbers are not the machine's.
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    assert ("no performance of this machine" in picture) == (answer["substrate"].get("cuda") == "twin")


@needs(cuda.device())
def test_for_people_the_speed_of_a_twin_is_not_printed(tmp_path: Path) -> None:
    done = bench("--folder", tmp_path, "--direct", "never")
    assert done.returncode == 0
    assert "durable write" in done.stdout
    twin = "no performance of this machine" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "cached read" in line]
    assert {"-" in row for row in rows} == {twin}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--plot", "plot.png"], "neither .html nor .svg"),
        (["--folder", "none"], "none"),
        (["--size", "0"], "0"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_measured(options: list[str], said: str) -> None:
    done = bench("--host", *options)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_plot_has_each_point_where_it_belongs(tmp_path: Path) -> None:
    lines = [Line("slow & <steady>", [(4 * KIB, 1.0), (MIB, 2.0)]), Line("fast", [(4 * KIB, 4.0), (MIB, 8.0)])]
    plot = Plot(title="Title", note="note", unit="GB/s", lines=lines)
    root = ET.fromstring(draw(plot))  # noqa: S314 - what this very program wrote.
    points = {each.findtext(f"{SVG}title"): each for each in root.iter(f"{SVG}circle") if len(each)}
    heights = {said: float(each.get("cy", "")) for said, each in points.items()}
    assert list(heights) == [
        "slow & <steady>, 4 KiB: 1",
        "slow & <steady>, 1 MiB: 2",
        "fast, 4 KiB: 4",
        "fast, 1 MiB: 8",
    ]
    # Twice as much is twice as high above the axis.
    ones = list(heights.values())
    assert ones == sorted(ones, reverse=True)
    zero = 2 * ones[0] - ones[1]
    assert [round((zero - each) / (zero - ones[0]), 3) for each in ones] == [1, 2, 4, 8]
    write_plot(tmp_path / "plot.svg", plot)
    assert (tmp_path / "plot.svg").read_text() == draw(plot)
    with pytest.raises(UsageError):
        draw(Plot(title="", note="", unit="", lines=[]))
