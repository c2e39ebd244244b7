"""Only a few modules of gdrkit mention Gaudi, because support for a device must not change the other modules.

docs/add-a-device.md has the same list.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT_ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = PROJECT_ROOT / "docs" / "add-a-device.md"
GAUDI_WORD = re.compile(r"gaudi|habana|hl-?thunk", re.IGNORECASE)

# The files below gdrkit/ that may mention Gaudi, each with the maximum number of such lines and their purpose.
ALLOWED_MENTIONS = {
    "errors.py": (1, "the name of the API in errors"),
    "buffers.py": (4, "the memory kind, and comments"),
    "host/__init__.py": (2, "reads the PCI bus"),
    "host/kernel.py": (1, "kernel modules that matter to transfers"),
    "host/pci.py": (5, "reads the PCI bus"),
    "launch.py": (4, "the twin, and the hardware that it emulates"),
    "registration/policy.py": (2, "the registration routes of Gaudi memory: dma-buf alone"),
    "inventory/gaudi.py": (99, "the facts about Gaudi devices, and their query"),
    "inventory/facts.py": (12, "the fields for the facts about Gaudi devices"),
    "inventory/api_query.py": (3, "the child process that queries the devices"),
    "inventory/probe.py": (14, "the decision whether to query the devices"),
    "inventory/profile.py": (7, "the profiles of machines with Gaudi"),
    "report/describe.py": (8, "the facts about Gaudi devices as text"),
    "report/substrate.py": (7, "whether Gaudi was hardware or a twin"),
    "report/view.py": (6, "the API in a report"),
    "report/unproven.py": (2, "the name of the hardware that a case needs"),
    "harness/needs/gaudi.py": (99, "the needs of cases with Gaudi"),
    "harness/needs/__init__.py": (3, "the name of the module with the needs of Gaudi, and the API that they query"),
    "harness/fixtures.py": (7, "the pytest fixture that opens a Gaudi device"),
    "harness/leaks.py": (4, "the first use of a device, before leaks are counted"),
    "faultplan.py": (2, "functions that a fault plan may name"),
    "twin_run/report.py": (1, "whether a run on twins used hl-thunk"),
    "twin_run/usage.py": (2, "the number of hl-thunk in the record of a run"),
    "harness/session.py": (1, "the substrate of hl-thunk in a run"),
    "monitor/process.py": (1, "the kind of the host memory that is mapped for Gaudi, which is pinned"),
    "observe/sampled_process.py": (1, "the file name of hl-thunk, in the list of libraries that move bytes"),
}
# These modules handle memory of any device and must not depend on its vendor.
VENDOR_INDEPENDENT_MODULES = (
    "registration/cache.py",
    "registration/pool.py",
    "registration/share.py",
    "storage",
    "usrbio",
    "verbs",
    "cuda",
)


def count_mentions() -> dict[str, int]:
    """Return the number of lines that mention Gaudi, by file, without the package gaudi itself."""
    package_folder = PROJECT_ROOT / "gdrkit"
    count_by_file = {}
    for path in sorted(package_folder.rglob("*.py")):
        file = path.relative_to(package_folder).as_posix()
        line_count = sum(bool(GAUDI_WORD.search(line)) for line in path.read_text().splitlines())
        if line_count and not file.startswith("gaudi/"):
            count_by_file[file] = line_count
    return count_by_file


def test_only_listed_modules_mention_gaudi() -> None:
    count_by_file = count_mentions()
    assert count_by_file.keys() == ALLOWED_MENTIONS.keys()
    excess_counts = {file: count for file, count in count_by_file.items() if count > ALLOWED_MENTIONS[file][0]}
    assert not excess_counts


@pytest.mark.parametrize("module", VENDOR_INDEPENDENT_MODULES)
def test_memory_transport_does_not_mention_gaudi(module: str) -> None:
    assert not [file for file in count_mentions() if file == module or file.startswith(f"{module}/")]


def test_native_parts_do_not_mention_gaudi() -> None:
    sources = [path for path in (PROJECT_ROOT / "native").rglob("*.[ch]*") if "twins" not in path.parts]
    assert len(sources) > 50
    assert not [path for path in sources if GAUDI_WORD.search(path.read_text())]


def test_document_shows_the_list() -> None:
    text = DOCUMENT.read_text()
    purpose_by_file = dict(re.findall(r"^\| `gdrkit/([\w/.]+)` \| (.+) \|$", text, re.MULTILINE))
    assert purpose_by_file == {file: purpose for file, (_, purpose) in ALLOWED_MENTIONS.items()}
