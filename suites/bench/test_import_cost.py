"""Duration of `import gdrkit`: the difference between the medians of the two cases in one run.

One case starts a bare Python interpreter, the other case also imports gdrkit.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

PROGRAMS = {"bare interpreter": "", "import gdrkit": "import gdrkit"}


@pytest.mark.benchmark(min_rounds=20, warmup=True)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_start_of_an_interpreter(benchmark: BenchmarkFixture, program: str) -> None:
    benchmark(subprocess.run, [sys.executable, "-c", program], check=True)
