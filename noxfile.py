"""Every command that a developer or the CI needs; `nox -l` lists them.

Only the standard library and nox are used here, and hardware is looked for in sysfs alone: this file runs before
anything is installed. What a nox session needs it installs once, into `.nox/`, and again only when what it was made
from has changed. The exit code of a command that has a meaning (see the README) becomes the exit code of nox.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import nox

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "bench",
    "bundle",
    "direct",
    "fresh",
    "gpu",
    "hardware",
    "lab",
    "lint",
    "long",
    "meta",
    "native",
    "pages",
    "qualify",
    "review",
    "sample",
    "suites",
    "types",
]

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "native", "suites", "review", "meta"]
nox.options.default_venv_backend = "none"

HOUSE = Path(__file__).resolve().parent
ENVIRONMENTS = HOUSE / ".nox"
NATIVE = HOUSE / "native"
TWINS = NATIVE / "twins"
SYSTEM_PYTHON = "/usr/bin/python3"
# What is about the house rather than about transfers has a nox session of its own.
ALL_CASES = ("suites", "--ignore=suites/meta")
LONG_SEEDS = range(1, 11)
LONG_EXAMPLES = 2000
LONG_FUZZ_S = 300
LONG_KILLS = 230
LONG_TIER_KILLS = 300
LONG_KILLED_CLIENTS = 10_000
LONG_HONEST_OPERATIONS = 100_000
# Whose cases have numbers that can be larger.
LONG_CASES = (
    "suites/property",
    "suites/storage/test_wire.py",
    "suites/usrbio/test_bad_input.py",
    "suites/inventory/test_importers.py",
    "suites/usrbio/test_killed_clients.py",
    "suites/usrbio/test_hostile_clients.py",
    "suites/fault/test_kills.py",
    "suites/tiers/test_kills.py",
    "suites/tiers/test_power_cuts.py",
)

WRONG_USAGE, SETUP_MISSING, NOTHING_PROVEN = 2, 3, 4
PYTEST_BAD_OPTION, PYTEST_NO_CASE = 4, 5

# What ruff and clang-format call well formed changes with their versions, so these are exact.
LINT = ("ruff==0.17.5", "clang-format==14.0.6")
TYPES = ("mypy==2.4.1",)
BUILD = ("cmake>=3.25,<4", "ninja>=1.11", "scikit-build-core>=1.0,<2", "nanobind>=2.4,<4")
# atheris guides the fuzzing of parsers; there are no wheels of it for other machines and newer Pythons.
RUN = ("nox>=2024.4.15", "atheris>=2.3; python_version < '3.14' and platform_machine == 'x86_64'")
# Installed without what it says that it needs: two gigabytes of CUDA libraries, which the suites do without.
KVIKIO = ("kvikio-cu13==26.10.*", "libkvikio-cu13==26.10.*", "rapids-logger==0.3.*", "packaging")
# What a folder that travels may have.
BUNDLE_BYTES_MAX = 64 << 20
BENCH_PROGRAMS = ("usrbio_path_bench", "usrbio_ring_bench")
# What makes the file systems that cases mount, and the package that has it.
MKFS = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs"}
# Its rules change with its versions, so this is exact.
AXE = "axe-core@4.14.1"
# What the sample report is made of; facts.json, as `gdrkit facts --json` prints it, may lie beside the records.
SAMPLED = Path("reports", "baselines", "h200-1")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LAB = ("virtme-ng==1.42",)
# What the lab runs, and the package that has it.
LAB_PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "modprobe": "kmod",
    "ip": "iproute2",
}


# --------------------------------------------------------------------------------------------------------- nox sessions


@nox.session(default=False)
def qualify(session: nox.Session) -> None:
    """Qualify this machine and write the report; where it has no hardware, qualify the code on the software twins."""
    run = prepare_run(twins=True)
    arguments = list(session.posargs)
    found = hardware_found()
    if any(found.values()):
        say("hardware: " + ", ".join(itertools.chain(*found.values())))
    elif "--software" not in arguments:
        say("no RDMA device and no GPU here: adding --software, which proves the code and not this machine")
        arguments.append("--software")
    finish(call([str(run / "gdrkit"), "qualify", *arguments]))


@nox.session
def suites(session: nox.Session) -> None:
    """Run the suites on the twins, or the part that is named: nox -s suites -- suites/rdma -k write."""
    run = prepare_run(twins=True)
    install_fuse()
    install_mpi()
    install_file_systems()
    # What measures hardware does so once and small, so that it still runs when somebody has a machine for it.
    arguments = cases(session.posargs, *ALL_CASES, "hardware/throughput")
    finish_pytest(session, call([*on_twins(run), *pytest(run), *arguments]))


@nox.session
def meta(session: nox.Session) -> None:
    """Check the house itself: levels, seams, banned words, what `import gdrkit` opens, exit codes, the wheel."""
    run = prepare_run(twins=True)
    build_wheel()
    finish_pytest(session, call([*pytest(run), "suites/meta", *session.posargs]))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff and clang-format; `-- --fix` mends what they can mend."""
    tools = environment("lint", python=interpreter()[0], requirements=LINT)
    ends, rooms = ("cpp", "hpp", "h"), (NATIVE, HOUSE / "suites")
    sources = sorted(str(path) for room in rooms for end in ends for path in room.rglob(f"*.{end}"))
    mend = "--fix" in session.posargs
    codes = [
        call([str(tools / "ruff"), "check", "--output-format=concise", *(["--fix"] if mend else [])]),
        call([str(tools / "ruff"), "format", *([] if mend else ["--check"])]),
        call(
            [
                str(tools / "clang-format"),
                *(["-i"] if mend else ["--dry-run", "--Werror", "--ferror-limit=1"]),
                *sources,
            ],
            shown=5,
        ),
    ]
    scripts = [HOUSE / ".ci" / "run", *HOUSE.glob("suites/support/*.sh"), *HOUSE.glob("hardware/lab/*.sh")]
    codes += [call(["bash", "-n", str(path)]) for path in scripts]
    fail_unless_zero(session, codes)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all Python here with mypy --strict."""
    run = prepare_run(twins=False, native_parts=False)
    tools = environment("types", python=interpreter()[0], requirements=TYPES)
    command = [str(tools / "mypy"), "--python-executable", str(run / "python"), *session.posargs]
    fail_unless_zero(session, [call(command)])


@nox.session
def native(session: nox.Session) -> None:
    """Build the native code and run its tests, as users get it and under the address and undefined-behaviour
    sanitizers.
    """
    install_system_packages(native_packages(interpreter()[0]))
    # The twins first: the product's tests run on them, each preset on its own.
    trees = itertools.product((TWINS, NATIVE), ("release", "asan-ubsan"))
    fail_unless_zero(session, [check_native(tree, preset) for tree, preset in trees])


@nox.session(default=False)
def long(session: nox.Session) -> None:
    """Run what takes long: the native tests under the thread sanitizer, the suites with ten seeds, the state
    machines with 2,000 examples, five minutes of each fuzzer, 230 kills of the storage path and 300 of migrations,
    10,000 killed clients of one agent, 100,000 operations beside each attack;
    build the wheel with nothing that was built before.
    """
    run = prepare_run(twins=True)
    install_fuse()
    install_file_systems()
    codes = [check_native(tree, "tsan") for tree in (TWINS, NATIVE)]
    codes.append(
        call([str(run / "pip"), "wheel", "--quiet", "--no-deps", "-w", str(HOUSE / "build" / "alone"), str(HOUSE)])
    )
    for seed in LONG_SEEDS:
        command = [*pytest(run), *ALL_CASES, "-q", *session.posargs]
        codes.append(call([*on_twins(run, "--seed", str(seed)), *command]))
    # What takes minutes here is no hang whose stack somebody wants to see.
    larger = [*pytest(run), *LONG_CASES, "-q", "-o", "faulthandler_timeout=1800", *session.posargs]
    options = {
        "GDRKIT_EXAMPLES": str(LONG_EXAMPLES),
        "GDRKIT_FUZZ_S": str(LONG_FUZZ_S),
        "GDRKIT_KILLS": str(LONG_KILLS),
        "GDRKIT_TIER_KILLS": str(LONG_TIER_KILLS),
        "GDRKIT_KILLED_CLIENTS": str(LONG_KILLED_CLIENTS),
        "GDRKIT_HONEST_OPERATIONS": str(LONG_HONEST_OPERATIONS),
    }
    codes.append(call([*on_twins(run), *larger], environ=options))
    fail_unless_zero(session, codes)


@nox.session
def review(session: nox.Session) -> None:
    """Show that the cases of the GDR review can fail: put each defect back, see it caught, write docs/findings.md."""
    run = prepare_run(twins=True)
    libraries = build_defects()
    # The defects are no part of any package; the review finds them by this path, and its children by what it adds.
    path = os.pathsep.join(filter(None, (str(HOUSE / "suites"), os.environ.get("PYTHONPATH", ""))))
    program = [str(run / "python"), "-m", "meta.defects.run", "--libraries", str(libraries)]
    command = [*on_twins(run), *program, *session.posargs]
    fail_unless_zero(session, [call(command, environ={"PYTHONPATH": path})])


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure what gdrkit itself costs, each beside its peer of the same run; -- --records FILE keeps the numbers."""
    run = prepare_run(twins=True)
    programs = build_bench_programs()
    # Four gigabytes, as on a GPU, had not come to their end on twins after nine minutes, and show nothing more.
    os.environ.setdefault("GDRKIT_BENCH_STORAGE_MIB", "64")
    command = [*on_twins(run), *pytest(run), "--benchmark-enable", *cases(session.posargs, "suites/bench")]
    finish_pytest(session, call(command, environ={"GDRKIT_BENCH_PROGRAMS": str(programs)}))


@nox.session(default=False)
def hardware(session: nox.Session) -> None:
    """Run what fits the hardware of this machine, and say why the rest does not; ends with 4 where it has none."""
    found = hardware_found()
    lacking = [api for api, things in found.items() if not things]
    if len(lacking) == len(found):
        say("no RDMA device in /sys/class/infiniband, no NVIDIA driver in /proc/driver, no NVIDIA GPU or Gaudi on PCI:")
        say("nothing here can be proven on hardware. `nox -s suites` runs the same cases on the software twins.")
        sys.exit(NOTHING_PROVEN)
    say("hardware: " + ", ".join(itertools.chain(*found.values())))
    run = prepare_run(twins=bool(lacking))
    for name, fitting in sessions_that_fit(run).items():
        say(f"nox -s {name}: {'runs' if fitting['fits'] else 'does not run'}: {fitting['why']}")
        if fitting["fits"]:
            session.notify(name, posargs=[*fitting["arguments"], *session.posargs])


@nox.session(default=False)
def direct(session: nox.Session) -> None:
    """Run the suites on the hardware of this machine, and on twins of what it lacks."""
    lacking = [api for api, things in hardware_found().items() if not things]
    run = prepare_run(twins=bool(lacking))
    install_fuse()
    install_file_systems()
    launcher = on_twins(run, "--apis", ",".join(lacking)) if lacking else []
    finish_pytest(session, call([*launcher, *pytest(run), *cases(session.posargs, *ALL_CASES)]))


@nox.session(default=False)
def lab(session: nox.Session) -> None:
    """Run the RDMA suites on a real kernel's RDMA stack and compare them with the twins: on the RDMA devices of this
    machine or on rxe where it has them, else in a virtual machine.
    """
    # Debian does not have administrators' programs, depmod among them, in everybody's PATH.
    os.environ["PATH"] = path_of_administrators()
    here = bool(hardware_found()["verbs"]) or may_load_rxe()
    if not here:
        install_system_packages([package for name, package in LAB_PROGRAMS.items() if not shutil.which(name)])
    install_perftest()
    run = prepare_run(twins=True)
    tools = environment("lab", python=interpreter()[0], requirements=LAB)
    where = ["--here"] if here else [f"--tools={tools}"]
    finish(call([str(run / "python"), "-m", "hardware.lab", *where, *session.posargs]))


@nox.session(default=False)
def bundle(session: nox.Session) -> None:
    """Prepare one folder with which a machine with GPUs and no package registry runs its cases:
    -- --python 3.12 --output build/bundle; there `python3 build/bundle/gpu.py`, or `nox -s gpu`. With
    --extras FOLDER, wheels of kvikio and numpy are taken from that folder where no registry has them.
    """
    options = iter(session.posargs)
    given = {name.removeprefix("--"): next(options, "") for name in options}
    if not given.keys() <= {"python", "output", "extras"} or not all(given.values()):
        say("usage: nox -s bundle -- [--python VERSION_OR_PATH] [--output FOLDER] [--extras FOLDER]")
        sys.exit(WRONG_USAGE)
    extras = Path(given["extras"]).resolve() if "extras" in given else None
    output = Path(given.get("output", HOUSE / "build" / "bundle"))
    fill_bundle(python=given.get("python", "3.12"), output=output, extras=extras)


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Run contract, share, registration, gds and throughput on the GPUs of this machine, from what `bundle` made."""
    command = [sys.executable, str(HOUSE / "hardware" / "gpu" / "run.py"), *session.posargs]
    if "--bundle" not in session.posargs:
        command += ["--bundle", str(HOUSE / "build" / "bundle")]
    finish(call(command))


@nox.session(default=False)
def pages(session: nox.Session) -> None:
    """Look at the report in headless Chromium, at two widths, light and dark, with axe-core; keeps the pictures in
    reports/runs/pages.
    """
    if not any(map(shutil.which, BROWSERS)):
        install_system_packages(["chromium"])
    tools = ENVIRONMENTS / "pages"
    axe = tools / "node_modules" / "axe-core"
    wanted = AXE.rpartition("@")[2]
    with locked():
        if not axe.exists() or json.loads((axe / "package.json").read_text())["version"] != wanted:
            if not shutil.which("npm"):
                stop("npm is needed, which installs axe-core. Debian: apt-get install npm")
            set_up(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(tools), AXE])
    run = prepare_run(twins=False)
    named = {"GDRKIT_AXE": str(axe / "axe.min.js"), "GDRKIT_PICTURES": str(HOUSE / "reports" / "runs" / "pages")}
    command = [*pytest(run), "suites/report/test_in_browser.py", *session.posargs]
    finish_pytest(session, call(command, environ=named))


@nox.session(default=False)
def sample(session: nox.Session) -> None:
    """Make docs/sample-report/index.html again, from the records of a real machine below reports/baselines."""
    run = prepare_run(twins=False)
    made, shown = HOUSE / "build" / "sample-report", HOUSE / "docs" / "sample-report" / "index.html"
    finish(call([str(run / "gdrkit"), "report", str(HOUSE / SAMPLED), "--output", str(made), *session.posargs]))
    shown.parent.mkdir(exist_ok=True)
    shutil.copyfile(made / "index.html", shown)
    say(f"made {shown.relative_to(HOUSE)}")


@nox.session(default=False)
def fresh(session: nox.Session) -> None:
    """Make a fresh Debian 12 in a folder (root, debootstrap), run the README's two commands in it and time them."""
    finish(call(["bash", str(HOUSE / "suites" / "support" / "fresh_machine.sh"), *session.posargs]))


# ------------------------------------------------------------------------------------------------------------ detection


def sessions_that_fit(run: Path) -> dict[str, dict[str, Any]]:
    """By the name of a nox session: whether it fits the hardware here, why, and its arguments; `gdrkit plan` knows."""
    said = answer([str(run / "gdrkit"), "plan", "--json"])
    if not said:
        stop(f"`{run / 'gdrkit'} plan --json` does not answer; run it to see why.")
    planned: dict[str, dict[str, Any]] = json.loads(said)["sessions"]
    return {name: entry for name, entry in planned.items() if entry["hardware"]}


def hardware_found() -> dict[str, list[str]]:
    """What this machine has by API, from sysfs and procfs alone: a phrase for each thing, none on a bare machine."""
    nics = [f"RDMA device {path.name}" for path in sorted(Path("/sys/class/infiniband").glob("*"))]
    gpus = ["the NVIDIA driver"] if Path("/proc/driver/nvidia/version").exists() else []
    accelerators: list[str] = []
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        with contextlib.suppress(OSError):  # A device may go while we look; then it is not there.
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            if vendor == "0x10de" and kind.startswith("0x03"):
                gpus.append(f"NVIDIA GPU {device.name}")
            elif vendor == "0x1da3":
                accelerators.append(f"Habana accelerator {device.name}")
    return {"verbs": nics, "cuda": gpus, "hlthunk": accelerators}


def may_load_rxe() -> bool:
    """Whether this kernel has the software RDMA device rxe and this user may load it (nothing is loaded yet)."""
    tools = all(map(shutil.which, ("modprobe", "ip", "rdma")))
    return os.geteuid() == 0 and tools and subprocess.call(["modprobe", "-nq", "rdma_rxe"]) == 0


@functools.cache
def interpreter() -> tuple[str, bool]:
    """The Python for the suites, and whether pyverbs must be built for it by pip.

    Debian and Ubuntu ship pyverbs for their own Python, so that one is taken where it is new enough. Elsewhere the
    first Python that is new enough serves, and PyPI's pyverbs is built for it.
    """
    if version_of(SYSTEM_PYTHON) >= (3, 11) and (has_pyverbs() or shutil.which("apt-get")):
        return SYSTEM_PYTHON, False
    others = filter(None, map(shutil.which, ("python3.13", "python3.12", "python3.11")))
    # The Python under nox's own environment: the same one, whichever nox it was that asked.
    own = os.path.realpath(sys.executable)
    candidate = next((python for python in (own, *others) if version_of(python) >= (3, 11)), None)
    if candidate is None:
        stop("gdrkit needs Python 3.11 or newer, and no Python here is.")
    return candidate, True


def version_of(python: str) -> tuple[int, ...]:
    """(3, 11) for Python 3.11.2; (0,) for what is no Python."""
    question = "import sys; print(*sys.version_info[:2])"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return tuple(map(int, subprocess.check_output([python, "-c", question], text=True).split()))
    return (0,)


def has_pyverbs() -> bool:
    """Whether the system's Python has the system's pyverbs (looked for, not imported: that would load libibverbs)."""
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('pyverbs') is None)"
    return subprocess.call([SYSTEM_PYTHON, "-I", "-c", question], stderr=subprocess.DEVNULL) == 0


# ------------------------------------------------------------------------------------------------------ system packages


def native_packages(python: str) -> list[str]:
    """What the native build, with its modules for this Python, needs and the system lacks."""
    missing = [] if shutil.which("c++") else ["g++"]
    if not Path("/usr/include/infiniband/verbs.h").exists():
        missing.append("libibverbs-dev")
    question = "import sysconfig; print(sysconfig.get_path('include'))"
    headers = Path(answer([python, "-c", question]), "Python.h")
    return missing if headers.exists() else [*missing, "python3-dev"]


def pyverbs_packages() -> list[str]:
    """What building pyverbs needs beyond the native build, and the system lacks."""
    missing = [] if shutil.which("pkg-config") else ["pkgconf"]
    return missing + [name for name in ("libnl-3-dev", "libnl-route-3-dev") if not installed(name)]


def install_system_packages(packages: Sequence[str]) -> None:
    """Install these by apt when root; else, or beside a vendor's RDMA stack, say what to do and stop with 3."""
    if not packages:
        return
    line = ["apt-get", "install", "-y", "--no-remove", "--no-install-recommends", *packages]
    say("missing on this system: " + " ".join(packages))
    vendor = vendor_stack()
    if vendor:
        say(f"This machine has a vendor's RDMA stack ({vendor}), and apt might replace parts of it.")
        stop("Install what is missing from the vendor's packages, then try again: " + " ".join(packages))
    if not shutil.which("apt-get"):
        stop("There is no apt-get here. Install what Debian calls " + " ".join(packages) + ", then try again.")
    if os.geteuid() != 0:
        stop("Run this line, then try again:  sudo " + " ".join(line))
    changes = planned(line)
    if changes is None:
        say("apt knows no such package yet: apt-get update")
        call(["apt-get", "update", "-q"], shown=3)
        changes = planned(line)
    if changes is None:
        stop("apt cannot install that; this line shows why:  " + " ".join(line))
    # An update within the distribution's own release comes with any package that needs it. What is foreign to it, or
    # carries RDMA and CUDA, is not ours to touch.
    replaced = [change for change in changes if is_replaced(change)]
    foreign = [change for change in replaced if not is_release_update(change)]
    if foreign:
        stop("That would replace installed packages, which is yours to decide: " + "; ".join(foreign))
    if replaced:
        say("apt updates, within this release: " + " ".join(change.split()[1] for change in replaced))
    say("apt installs: " + " ".join(change.split()[1] for change in changes))
    if call([*line, "-qq", "-o", "Dpkg::Use-Pty=0"], environ={"DEBIAN_FRONTEND": "noninteractive"}) != 0:
        stop("apt-get failed.")


def is_replaced(change: str) -> bool:
    """Whether a line of ``apt-get -s`` replaces something: ``Inst name [old version] (new version ...)`` does."""
    return "[" in change.partition("(")[0]


def is_release_update(change: str) -> bool:
    """Whether a replaced package and its successor are the distribution's own, and have no part in RDMA and CUDA."""
    name, new = change.split()[1], change.partition("(")[2]
    ours = re.search(r"ibverbs|rdma|ibumad|mlx|mlnx|ofed|doca|nvidia|cuda|cufile", name)
    return ours is None and re.search(r" (Debian|Debian-Security|Ubuntu):", new) is not None


def install_fuse() -> None:
    """Install libfuse3 where this user may mount by FUSE and apt may install.

    Nothing depends on it but the cases of the FUSE mount, which say what they lack.
    """
    may = os.geteuid() == 0 and Path("/dev/fuse").exists() and shutil.which("apt-get")
    if not may or vendor_stack() or "libfuse3.so" in answer(["/sbin/ldconfig", "-p"]):
        return
    try:
        install_system_packages(["fuse3"])
    except SystemExit:
        say("Going on without it: the cases of the FUSE mount will not run.")


def install_mpi() -> None:
    """Install Open MPI where apt may; only the cases of several ranks need it, and they say what they lack."""
    if os.geteuid() != 0 or shutil.which("mpirun") or not shutil.which("apt-get") or vendor_stack():
        return
    try:
        install_system_packages(["openmpi-bin", "iproute2"])
    except SystemExit:
        say("Going on without it: the cases of several ranks will not run.")


def install_perftest() -> None:
    """Install perftest where apt may; only the initiator beside it needs it, and that case says what it lacks."""
    if os.geteuid() != 0 or shutil.which("ib_write_bw") or not shutil.which("apt-get") or vendor_stack():
        return
    try:
        install_system_packages(["perftest"])
    except SystemExit:
        say("Going on without it: the initiator will not run beside perftest.")


def path_of_administrators() -> str:
    """PATH, and behind it the folders of administrators' programs."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def install_file_systems() -> None:
    """Install mkfs.ext4 and mkfs.xfs where this user may mount by loop devices and apt may install.

    Nothing depends on them but cases of storage tiers, which say what they lack.
    """
    may = os.geteuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("apt-get")
    path = path_of_administrators()
    missing = [package for program, package in MKFS.items() if not shutil.which(program, path=path)]
    if not may or vendor_stack() or not missing:
        return
    try:
        install_system_packages(missing)
    except SystemExit:
        say("Going on without: cases that mount file systems of their own will not run.")


def planned(line: Sequence[str]) -> list[str] | None:
    """The packages that apt would install for this line, None when it cannot."""
    result = subprocess.run([*line, "-s"], capture_output=True, text=True, check=False)
    return [row for row in result.stdout.splitlines() if row.startswith("Inst ")] if result.returncode == 0 else None


def vendor_stack() -> str | None:
    """Why the RDMA libraries here are not the distribution's own; None when they are, or when there are none."""
    if shutil.which("ofed_info"):
        return "ofed_info is installed"
    listed = answer(["/sbin/ldconfig", "-p"])
    for row in listed.splitlines():
        name, _, path = row.strip().partition(" ")
        if name != "libibverbs.so.1":
            continue
        path = os.path.realpath(path.rpartition("=> ")[2])
        owner = answer(["dpkg-query", "-S", path]).partition(":")[0]
        if not owner:
            return f"{path} belongs to no package"
        about = answer(["dpkg-query", "-W", "-f", "${Version} ${Maintainer}", owner])
        if "mlnx" in about or not ("debian" in about.lower() or "ubuntu" in about.lower()):
            return f"{owner} {about}"
    return None


# --------------------------------------------------------------------------------------------------------- environments


def prepare_run(*, twins: bool, native_parts: bool = True) -> Path:
    """The environment of the suites: gdrkit from this tree (its own suites, editable) with its native parts, what it
    needs, and the twins.
    """
    python, build_pyverbs = interpreter()
    packages = native_packages(python) if twins or native_parts or build_pyverbs else []
    if build_pyverbs:
        packages += pyverbs_packages()
    elif not has_pyverbs():
        packages.append("python3-pyverbs")
    install_system_packages(packages)
    wanted = f"{HOUSE}[qualify,cuda13,cufile,fuse,mpi]"
    requirements = (*RUN, *(("pyverbs==59.0",) if build_pyverbs else ()), "-e", wanted)
    made_from = [HOUSE / "pyproject.toml"]
    run = environment("run", python=python, requirements=requirements, made_from=made_from, bare=KVIKIO)
    if twins:
        install_twins(run)
    if native_parts:
        install_native()
    return run


def environment(
    name: str,
    *,
    python: str,
    requirements: Sequence[str],
    made_from: Iterable[Path] = (),
    bare: Sequence[str] = (),
) -> Path:
    """The bin folder of the virtual environment `name`, made anew only when its requirements have changed.

    What is `bare` is installed without what it depends on, where there is a wheel of it for this machine.
    """
    folder = ENVIRONMENTS / name
    stamp = folder / "made-from"
    wanted = digest([python, str(version_of(python)), *requirements, *bare], made_from)
    with locked():
        if not stamp.exists() or stamp.read_text() != wanted:
            say(f"making the environment {folder.relative_to(HOUSE)}")
            if Path(sys.prefix) == folder:
                stop("This nox runs from that very environment. Use another nox.")
            set_up([sys.executable, "-m", "virtualenv", "--quiet", "--clear", "--python", python, str(folder)])
            # pyverbs 59.0 does not build with a newer Cython. pip reads one of the variables, by its version.
            constraint = str(HOUSE / ".ci" / "build-constraints.txt")
            pins = {"PIP_CONSTRAINT": constraint, "PIP_BUILD_CONSTRAINT": constraint}
            set_up([str(folder / "bin" / "pip"), "install", "--quiet", *requirements], environ=pins)
            no_wheel = bare and call([str(folder / "bin" / "pip"), "install", "--quiet", "--no-deps", *bare])
            if no_wheel:
                say(f"Going on without {bare[0]}: its cases will not run.")
            stamp.write_text(wanted)
    return folder / "bin"


def install_twins(run: Path) -> None:
    """Build the wheel of the twins from this tree and install it, when their sources have changed."""
    sources = [path for path in sorted(TWINS.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    stamp = run.parent / "twins-made-from"
    wanted = digest([], [path for path in sources if path.suffix != ".md" and "tests" not in path.parts])
    tools = environment("build", python=interpreter()[0], requirements=BUILD)
    with locked():
        if stamp.exists() and stamp.read_text() == wanted:
            return
        say("building the twins")
        wheels = HOUSE / "build" / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(TWINS)]
        # The folder of the release preset: what the nox session `native` compiled is not compiled again.
        kept = f"build-dir={HOUSE / 'build' / 'twins' / 'release'}"
        set_up([str(tools / "pip"), *build, "-C", kept], environ=on_path(tools))
        wheel = next(wheels.glob("*.whl"))
        set_up([str(run / "pip"), "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)])
        stamp.write_text(wanted)


def install_native() -> None:
    """Build the native parts of the product and put them into this tree, when their sources have changed."""
    sources = [path for path in sorted(NATIVE.rglob("*")) if path.is_file() and TWINS not in path.parents]
    python, aside = interpreter()[0], {"tests", "__pycache__"}
    sources = [path for path in sources if path.suffix != ".md" and not aside & set(path.relative_to(NATIVE).parts)]
    wanted = digest([python, str(version_of(python)), *BUILD], sources)
    tools = environment("build", python=python, requirements=BUILD)
    # In the tree that it speaks of: an environment that is made anew does not make it wrong.
    stamp = HOUSE / "build" / "native" / "installed-from"
    with locked():
        if stamp.exists() and stamp.read_text() == wanted:
            return
        say("building the native parts")
        stamp.unlink(missing_ok=True)
        install = ["cmake", "--install", "../build/native/release", "--prefix", str(HOUSE), "--component", "python"]
        for step in (*build_steps(tools, "release", testing=False), install):
            set_up([str(tools / step[0]), *step[1:]], environ=on_path(tools), folder=NATIVE)
        stamp.write_text(wanted)


def build_bench_programs() -> Path:
    """Build the native benchmarks; the folder where they are."""
    tools = environment("build", python=interpreter()[0], requirements=BUILD)
    configure, build = build_steps(tools, "release", testing=True)
    with locked():
        for step in (configure, [*build, "--target", *BENCH_PROGRAMS]):
            set_up([str(tools / step[0]), *step[1:]], environ=on_path(tools), folder=NATIVE)
    return HOUSE / "build" / "native" / "release" / "usrbio" / "tests"


def fill_bundle(*, python: str, output: Path, extras: Path | None) -> None:
    """Wheels of gdrkit, the twins, pyverbs and what they need, for one Python, and what runs them; the programs that
    benchmarks run; and, where they are to be had, the wheels of kvikio and numpy.
    """
    found = shutil.which(python if "/" in python else f"python{python}")
    if found is None or version_of(found) < (3, 11):
        stop(f"There is no Python {python} here (3.11 or newer) to make wheels for.")
    # A name on the PATH may be a script that asks where it stands.
    exact = answer([found, "-c", "import sys; print(sys.executable)"])
    install_system_packages([*native_packages(exact), *pyverbs_packages()])
    tools = environment("bundle", python=exact, requirements=BUILD)
    wheels, kept = output / "wheels", HOUSE / "build" / "bundle-parts"
    name = "cp" + "".join(map(str, version_of(exact)))
    wheel = [str(tools / "pip"), "wheel", "--quiet", "--no-deps"]
    constraint = str(HOUSE / ".ci" / "build-constraints.txt")
    with locked():
        shutil.rmtree(output, ignore_errors=True)
        # Of all parts only this one is the same in each version of the tree, and takes minutes.
        if not list((kept / name).glob("pyverbs-*.whl")):
            pins = {"PIP_CONSTRAINT": constraint, "PIP_BUILD_CONSTRAINT": constraint}
            set_up([*wheel, "--wheel-dir", str(kept / name), "pyverbs==59.0"], environ=pins)
        # From the sources alone: what was built into this tree is for another Python, and would go along.
        sources, built = kept / "tree", shutil.ignore_patterns(".*", "build", "runs", "*.so", "__pycache__")
        shutil.rmtree(sources, ignore_errors=True)
        shutil.copytree(HOUSE, sources, ignore=built)
        for source, part in ((sources / "native" / "twins", "twins"), (sources, f"native-{name}")):
            options = ["--no-build-isolation", "--wheel-dir", str(wheels), "-C", f"build-dir={kept / part}"]
            # The symbols alone are more than what may travel; the build ids, by which records name libraries, stay.
            set_up([*wheel, *options, "-C", "install.strip=true", str(source)], environ=on_path(tools))
        command = ["download", "--quiet", "--only-binary", ":all:", "--dest", str(wheels), "--find-links", str(wheels)]
        command += ["--find-links", str(kept / name), "gdrkit[qualify]", "gdrkit-twins", "pyverbs==59.0"]
        set_up([str(tools / "pip"), *command])
        more = ["download", "--quiet", "--only-binary", ":all:", "--no-deps", "--dest", str(output / "extras")]
        more += ["--find-links", str(extras)] if extras else []
        # packaging is among the wheels already.
        if call([str(tools / "pip"), *more, *(each for each in KVIKIO if each != "packaging"), "numpy"]):
            say(f"Going on without {KVIKIO[0]}: its cases will not run there.")
    programs = build_bench_programs()
    (output / "bench").mkdir()
    for program in BENCH_PROGRAMS:
        shutil.copy(programs / program, output / "bench" / program)
        set_up(["strip", str(output / "bench" / program)])
    (output / "lib").mkdir()
    library = next(iter(re.findall(r"librdmacm\.so\.1 .*=> (\S+)", answer(["/sbin/ldconfig", "-p"]))), None)
    if library is None:
        stop("There is no librdmacm.so.1 here, without which pyverbs does not load: apt-get install librdmacm1")
    shutil.copy(os.path.realpath(library), output / "lib" / "librdmacm.so.1")
    shutil.copy(HOUSE / "hardware" / "gpu" / "run.py", output / "gpu.py")
    commit = answer(["git", "-C", str(HOUSE), "describe", "--always", "--abbrev=40", "--dirty"]) or "unknown"
    (output / "bundle.json").write_text(json.dumps({"commit": commit, "python": name}) + "\n")
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    say(f"{output}: {size / (1 << 20):.1f} MiB for Python {'.'.join(map(str, version_of(exact)))}; there: gpu.py")
    if size > BUNDLE_BYTES_MAX:
        stop(f"That is more than {BUNDLE_BYTES_MAX >> 20} MiB.")


def build_wheel() -> None:
    """Build the wheel of the product into build/wheels; what `install_native` compiled is not compiled again."""
    tools = environment("build", python=interpreter()[0], requirements=BUILD)
    wheels = HOUSE / "build" / "wheels"
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(HOUSE)]
    with locked():
        for old in wheels.glob("gdrkit-*.whl"):
            old.unlink()
        kept = f"build-dir={HOUSE / 'build' / 'native' / 'release'}"
        set_up([str(tools / "pip"), *build, "-C", kept], environ=on_path(tools))


def build_steps(tools: Path, preset: str, *, testing: bool) -> list[list[str]]:
    """How to configure and build one CMake preset, in the folder of its project."""
    options = [f"-DBUILD_TESTING={'ON' if testing else 'OFF'}", f"-DPython_EXECUTABLE={tools / 'python'}"]
    # The twins have no Python modules, and so no use for the second option.
    configure = ["cmake", "--preset", preset, *options, "--no-warn-unused-cli"]
    return [configure, ["cmake", "--build", "--preset", preset]]


def build_defects() -> Path:
    """Build the client libraries that have a defect each, for the review alone; the folder with them."""
    sources, build = HOUSE / "suites" / "meta" / "defects" / "native", HOUSE / "build" / "defects"
    tools = environment("build", python=interpreter()[0], requirements=BUILD)
    steps = (
        ["cmake", "-G", "Ninja", "-S", str(sources), "-B", str(build), "-DCMAKE_BUILD_TYPE=RelWithDebInfo"],
        ["cmake", "--build", str(build)],
    )
    with locked():
        for step in steps:
            set_up([str(tools / step[0]), *step[1:]], environ=on_path(tools))
    return build


def check_native(tree: Path, preset: str) -> int:
    """Configure, build and test one CMake preset of a native project; the first exit code that is not 0."""
    tools = environment("build", python=interpreter()[0], requirements=BUILD)
    configure, build = build_steps(tools, preset, testing=True)
    if tree == NATIVE:
        beneath = HOUSE / "build" / "twins" / preset / "lib"
        configure += [f"-DGDRKIT_CUDA={beneath / 'cuda'}", f"-DGDRKIT_VERBS={beneath / 'ibverbs'}"]
    for step in (configure, build, ["ctest", "--preset", preset]):
        code = call([str(tools / step[0]), *step[1:]], environ=on_path(tools), folder=tree)
        if code:
            return code
    return 0


def digest(words: Iterable[str], files: Iterable[Path]) -> str:
    """A name for exactly these words and the contents of these files."""
    total = hashlib.sha256("\0".join(words).encode())
    for path in files:
        total.update(f"\0{path}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def installed(package: str) -> bool:
    """Whether dpkg has this package installed."""
    return answer(["dpkg-query", "-W", "-f", "${Status}", package]).endswith(" installed")


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Let only one nox at a time change the environments of this tree."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------------------------------------------- commands and ends


def call(
    command: Sequence[str], *, environ: dict[str, str] | None = None, folder: Path = HOUSE, shown: int = 1000
) -> int:
    """Run a command in the tree and give its exit code; `shown` is how many of its words are printed first."""
    words = [os.path.relpath(word, HOUSE) if word.startswith(f"{HOUSE}/") else word for word in command]
    say("> " + " ".join(words[:shown]) + (" ..." if len(words) > shown else ""))
    return subprocess.call(command, cwd=folder, env={**os.environ, **(environ or {})})


def pytest(run: Path) -> list[str]:
    """How to begin a pytest command in this environment.

    Its settings are named, since pytest looks for them from whatever of its arguments exists, a records file too.
    """
    return [str(run / "python"), "-m", "pytest", "-c", str(HOUSE / "suites" / "pytest.ini")]


def cases(arguments: Sequence[str], *usual: str) -> list[str]:
    """The arguments of pytest, behind the usual cases where they name none.

    What is below suites or hardware names cases, also as a word behind an option: ``--ignore=suites/meta`` does not.
    A word that merely exists does not either: a file of records may.
    """
    rooms = {Path(os.path.relpath(HOUSE / argument, HOUSE)).parts[:1] for argument in arguments}
    return [*(() if rooms & {("suites",), ("hardware",)} else usual), *arguments]


def on_twins(run: Path, *options: str) -> list[str]:
    """How to begin a command that runs on the software twins."""
    return [str(run / "gdrkit"), "run", "--software", *options, "--"]


def answer(command: Sequence[str]) -> str:
    """What a command prints on standard output; empty when it fails or does not exist."""
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def on_path(tools: Path) -> dict[str, str]:
    """The environment variable by which the tools of a folder are found first."""
    return {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


def set_up(command: Sequence[str], *, environ: dict[str, str] | None = None, folder: Path = HOUSE) -> None:
    """Run a command of the set-up; when it fails, so does the set-up."""
    if call(command, environ=environ, folder=folder) != 0:
        stop("The set-up failed; what is above says why.")


def say(line: str) -> None:
    """Print a line at once, so that it stands before what a child prints."""
    print(line, flush=True)


def stop(line: str) -> NoReturn:
    """Say what is missing, and end nox with 3."""
    say(line)
    sys.exit(SETUP_MISSING)


def finish(code: int) -> None:
    """Go on after 0; else end nox with this very code (a failed nox session alone would make it 1)."""
    if code:
        sys.exit(code)


def finish_pytest(session: nox.Session, code: int) -> None:
    """End after pytest: its 4 (bad option) and 5 (no such case) are wrong usage; after failed cases other nox sessions
    still run.
    """
    if code == SETUP_MISSING:
        sys.exit(SETUP_MISSING)
    if code in (PYTEST_BAD_OPTION, PYTEST_NO_CASE):
        sys.exit(WRONG_USAGE)
    fail_unless_zero(session, [code])


def fail_unless_zero(session: nox.Session, codes: Sequence[int]) -> None:
    """Fail the nox session, and let the others run, when any of its commands failed."""
    if any(codes):
        session.error(f"{sum(map(bool, codes))} of {len(codes)} checks failed")
