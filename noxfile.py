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
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import nox

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "bench",
    "fresh",
    "hardware",
    "lab",
    "lint",
    "long",
    "meta",
    "native",
    "qualify",
    "review",
    "suites",
    "types",
]

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "native", "suites", "review", "meta"]
nox.options.default_venv_backend = "none"

HOUSE = Path(__file__).resolve().parent
ENVIRONMENTS = HOUSE / ".nox"
TWINS = HOUSE / "native" / "twins"
SYSTEM_PYTHON = "/usr/bin/python3"
# What is about the house rather than about transfers has a nox session of its own.
ALL_CASES = ("suites", "--ignore=suites/meta")
LONG_SEEDS = range(1, 11)
LONG_EXAMPLES = 2000
LONG_FUZZ_S = 300

WRONG_USAGE, SETUP_MISSING, NOTHING_PROVEN = 2, 3, 4
PYTEST_BAD_OPTION, PYTEST_NO_CASE = 4, 5

# What ruff and clang-format call well formed changes with their versions, so these are exact.
LINT = ("ruff==0.17.5", "clang-format==14.0.6")
TYPES = ("mypy==2.4.1",)
BUILD = ("cmake>=3.25,<4", "ninja>=1.11", "scikit-build-core>=1.0,<2")
# atheris guides the fuzzing of parsers; there are no wheels of it for other machines and newer Pythons.
RUN = ("nox>=2024.4.15", "atheris>=2.3; python_version < '3.14' and platform_machine == 'x86_64'")
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
    arguments = list(session.posargs)
    if not any((HOUSE / argument.partition("::")[0]).exists() for argument in arguments):
        arguments += ALL_CASES
    finish_pytest(session, call([*on_twins(run), *pytest(run), *arguments]))


@nox.session
def meta(session: nox.Session) -> None:
    """Check the house itself: levels, seams, banned words, what `import gdrkit` opens, exit codes, the wheel."""
    run = prepare_run(twins=True)
    finish_pytest(session, call([*pytest(run), "suites/meta", *session.posargs]))


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff and clang-format; `-- --fix` mends what they can mend."""
    tools = environment("lint", python=interpreter()[0], requirements=LINT)
    sources = sorted(str(path) for end in ("cpp", "hpp", "h") for path in (HOUSE / "native").rglob(f"*.{end}"))
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
    run = prepare_run(twins=False)
    tools = environment("types", python=interpreter()[0], requirements=TYPES)
    command = [str(tools / "mypy"), "--python-executable", str(run / "python"), *session.posargs]
    fail_unless_zero(session, [call(command)])


@nox.session
def native(session: nox.Session) -> None:
    """Build the native code and run its tests, as users get it and under the address and undefined-behaviour
    sanitizers.
    """
    install_system_packages(native_packages())
    fail_unless_zero(session, [check_native(preset) for preset in ("release", "asan-ubsan")])


@nox.session(default=False)
def long(session: nox.Session) -> None:
    """Run what takes long: the native tests under the thread sanitizer, the suites with ten seeds, the state
    machines with 2,000 examples, and five minutes of fuzzing.
    """
    run = prepare_run(twins=True)
    codes = [check_native("tsan")]
    for seed in LONG_SEEDS:
        command = [*pytest(run), *ALL_CASES, "-q", *session.posargs]
        codes.append(call([*on_twins(run, "--seed", str(seed)), *command]))
    # What takes minutes here is no hang whose stack somebody wants to see.
    machines = [*pytest(run), "suites/property", "-q", "-o", "faulthandler_timeout=900", *session.posargs]
    options = {"GDRKIT_EXAMPLES": str(LONG_EXAMPLES), "GDRKIT_FUZZ_S": str(LONG_FUZZ_S)}
    codes.append(call([*on_twins(run), *machines], environ=options))
    fail_unless_zero(session, codes)


@nox.session
def review(session: nox.Session) -> None:
    """Show that the cases of the GDR review can fail: put each defect back, see it caught, write docs/findings.md."""
    run = prepare_run(twins=True)
    # The defects are no part of any package; the review finds them by this path, and its children by what it adds.
    path = os.pathsep.join(filter(None, (str(HOUSE / "suites"), os.environ.get("PYTHONPATH", ""))))
    command = [*on_twins(run), str(run / "python"), "-m", "meta.defects.run", *session.posargs]
    fail_unless_zero(session, [call(command, environ={"PYTHONPATH": path})])


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure what gdrkit itself costs, each beside its peer of the same run; -- --records FILE keeps the numbers."""
    run = prepare_run(twins=True)
    command = [*on_twins(run), *pytest(run), "suites/bench", "--benchmark-enable", *session.posargs]
    finish_pytest(session, call(command))


@nox.session(default=False)
def hardware(session: nox.Session) -> None:
    """Run the suites on the hardware of this machine, and on twins of what it lacks; ends with 4 where it has none."""
    found = hardware_found()
    lacking = [api for api, things in found.items() if not things]
    if len(lacking) == len(found):
        say("no RDMA device in /sys/class/infiniband, no NVIDIA driver in /proc/driver, no NVIDIA GPU on PCI:")
        say("nothing here can be proven on hardware. `nox -s suites` runs the same cases on the software twins.")
        sys.exit(NOTHING_PROVEN)
    say("hardware: " + ", ".join(itertools.chain(*found.values())))
    run = prepare_run(twins=bool(lacking))
    launcher = on_twins(run, "--apis", ",".join(lacking)) if lacking else []
    finish_pytest(session, call([*launcher, *pytest(run), *(session.posargs or ALL_CASES)]))


@nox.session(default=False)
def lab(session: nox.Session) -> None:
    """Run the RDMA suites on a real kernel's RDMA stack and compare them with the twins: on the RDMA devices of this
    machine or on rxe where it has them, else in a virtual machine.
    """
    here = bool(hardware_found()["verbs"]) or may_load_rxe()
    if not here:
        install_system_packages([package for name, package in LAB_PROGRAMS.items() if not shutil.which(name)])
    run = prepare_run(twins=True)
    tools = environment("lab", python=interpreter()[0], requirements=LAB)
    where = ["--here"] if here else [f"--tools={tools}"]
    finish(call([str(run / "python"), "-m", "hardware.lab", *where, *session.posargs]))


@nox.session(default=False)
def fresh(session: nox.Session) -> None:
    """Make a fresh Debian 12 in a folder (root, debootstrap), run the README's two commands in it and time them."""
    finish(call(["bash", str(HOUSE / "suites" / "support" / "fresh_machine.sh"), *session.posargs]))


# ------------------------------------------------------------------------------------------------------------ detection


def hardware_found() -> dict[str, list[str]]:
    """What this machine has by API, from sysfs and procfs alone: a phrase for each thing, none on a bare machine."""
    nics = [f"RDMA device {path.name}" for path in sorted(Path("/sys/class/infiniband").glob("*"))]
    gpus = ["the NVIDIA driver"] if Path("/proc/driver/nvidia/version").exists() else []
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        with contextlib.suppress(OSError):  # A device may go while we look; then it is not there.
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            if vendor == "0x10de" and kind.startswith("0x03"):
                gpus.append(f"NVIDIA GPU {device.name}")
    return {"verbs": nics, "cuda": gpus}


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


def native_packages() -> list[str]:
    """What the native build needs and the system lacks."""
    missing = [] if shutil.which("c++") else ["g++"]
    return missing if Path("/usr/include/infiniband/verbs.h").exists() else [*missing, "libibverbs-dev"]


def pyverbs_packages(python: str) -> list[str]:
    """What building pyverbs for this Python needs and the system lacks."""
    missing = [] if shutil.which("pkg-config") else ["pkgconf"]
    missing += [name for name in ("libnl-3-dev", "libnl-route-3-dev") if not installed(name)]
    question = "import sysconfig; print(sysconfig.get_path('include'))"
    headers = Path(answer([python, "-c", question]), "Python.h")
    return missing if headers.exists() else [*missing, "python3-dev"]


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
    # apt -s prints "Inst name [old version] (new version ...)": the brackets are there only where something would be
    # replaced.
    replaced = [change for change in changes if "[" in change.partition("(")[0]]
    if replaced:
        stop("That would replace installed packages, which is yours to decide: " + "; ".join(replaced))
    say("apt installs: " + " ".join(change.split()[1] for change in changes))
    if call([*line, "-qq", "-o", "Dpkg::Use-Pty=0"], environ={"DEBIAN_FRONTEND": "noninteractive"}) != 0:
        stop("apt-get failed.")


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


def prepare_run(*, twins: bool) -> Path:
    """The environment of the suites: gdrkit from this tree (its own suites, editable), what it needs, and the twins."""
    python, build_pyverbs = interpreter()
    packages = native_packages() if twins or build_pyverbs else []
    if build_pyverbs:
        packages += pyverbs_packages(python)
    elif not has_pyverbs():
        packages.append("python3-pyverbs")
    install_system_packages(packages)
    requirements = (*RUN, *(("pyverbs==59.0",) if build_pyverbs else ()), "-e", f"{HOUSE}[qualify,cuda13]")
    run = environment("run", python=python, requirements=requirements, made_from=[HOUSE / "pyproject.toml"])
    if twins:
        install_twins(run)
    return run


def environment(name: str, *, python: str, requirements: Sequence[str], made_from: Iterable[Path] = ()) -> Path:
    """The bin folder of the virtual environment `name`, made anew only when its requirements have changed."""
    folder = ENVIRONMENTS / name
    stamp = folder / "made-from"
    wanted = digest([python, str(version_of(python)), *requirements], made_from)
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


def check_native(preset: str) -> int:
    """Configure, build and test one CMake preset of the twins; the first exit code that is not 0."""
    tools = environment("build", python=interpreter()[0], requirements=BUILD)
    steps = [
        ["cmake", "--preset", preset, "-DBUILD_TESTING=ON"],
        ["cmake", "--build", "--preset", preset],
        ["ctest", "--preset", preset],
    ]
    for step in steps:
        code = call([str(tools / step[0]), *step[1:]], environ=on_path(tools), folder=TWINS)
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


def set_up(command: Sequence[str], *, environ: dict[str, str] | None = None) -> None:
    """Run a command of the set-up; when it fails, so does the set-up."""
    if call(command, environ=environ) != 0:
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
