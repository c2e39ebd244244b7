"""The command `gdrkit run`, and the environment with which a child process runs on twins.

Twins are libraries that emulate the hardware below an API.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gdrkit import launch
from gdrkit.errors import Api, SetupMissing, UsageError
from gdrkit.harness.needs import needs, software

NEEDS_TWINS = needs(software(Api.VERBS), software(Api.CUDA))
PRINT_ENVIRONMENT_PROGRAM = "import os; print(os.environ.get('LD_LIBRARY_PATH', ''), os.environ['GDRKIT_TWINS_SEED'])"


def run_gdrkit(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-m", "gdrkit", *arguments], env=environment, capture_output=True, text=True, check=False
    )


@NEEDS_TWINS
def test_library_path_begins_with_the_selected_twins() -> None:
    environment_with_all_twins = launch.environment(
        launch.Launch(twin_apis=launch.APIS_WITH_TWINS), base={"LD_LIBRARY_PATH": "/opt/lib"}
    )
    library_folders = environment_with_all_twins["LD_LIBRARY_PATH"].split(":")
    twin_count = len(launch.APIS_WITH_TWINS)
    assert library_folders[twin_count:] == ["/opt/lib"]
    assert {Path(folder).name for folder in library_folders[:twin_count]} >= {"cuda", "hlthunk", "ibverbs"}
    environment_with_cuda_twin = launch.environment(
        launch.Launch(twin_apis=frozenset({Api.CUDA})), base=environment_with_all_twins
    )
    assert [Path(folder).name for folder in environment_with_cuda_twin["LD_LIBRARY_PATH"].split(":")] == ["cuda", "lib"]
    assert launch.environment(launch.Launch(), base=environment_with_all_twins)["LD_LIBRARY_PATH"] == "/opt/lib"
    assert "LD_LIBRARY_PATH" not in launch.environment(launch.Launch(), base={})


@NEEDS_TWINS
def test_domain_is_shared_unless_the_launch_is_isolated() -> None:
    """Processes in one domain see each other like processes of one machine."""
    default_launch = launch.Launch(twin_apis=launch.APIS_WITH_TWINS)
    assert "GDRKIT_TWINS_DOMAIN" not in launch.environment(default_launch, base={})
    environment_with_domain = launch.environment(default_launch, base={"GDRKIT_TWINS_DOMAIN": "lab"})
    assert environment_with_domain["GDRKIT_TWINS_DOMAIN"] == "lab"
    launch_with_domain = launch.Launch(twin_apis=launch.APIS_WITH_TWINS, domain="job")
    assert launch.environment(launch_with_domain, base={})["GDRKIT_TWINS_DOMAIN"] == "job"
    isolated_launch = launch.Launch(twin_apis=launch.APIS_WITH_TWINS, isolated=True)
    domains = {
        launch.environment(isolated_launch, base={"GDRKIT_TWINS_DOMAIN": "lab"})["GDRKIT_TWINS_DOMAIN"]
        for _ in range(3)
    }
    assert len(domains - {"lab"}) == 3
    assert all(len(domain) <= 32 for domain in domains)
    with pytest.raises(UsageError, match="'lab'"):
        launch.environment(launch.Launch(twin_apis=launch.APIS_WITH_TWINS, domain="lab", isolated=True), base={})


@NEEDS_TWINS
def test_seed_is_random_unless_it_is_given() -> None:
    launch_with_seed = launch.Launch(twin_apis=launch.APIS_WITH_TWINS, seed=7)
    assert launch.environment(launch_with_seed, base={})["GDRKIT_TWINS_SEED"] == "7"
    random_seed = launch.environment(launch.Launch(twin_apis=launch.APIS_WITH_TWINS), base={})["GDRKIT_TWINS_SEED"]
    assert 0 <= int(random_seed) < 2**64
    with pytest.raises(UsageError):
        launch.environment(launch.Launch(twin_apis=launch.APIS_WITH_TWINS, seed=2**64), base={})


@NEEDS_TWINS
def test_sanitizer_runtime_is_preloaded_first() -> None:
    base_environment = {"GDRKIT_TWINS_PRELOAD": "/usr/lib/libasan.so.8", "LD_PRELOAD": "/usr/lib/other.so"}
    environment = launch.environment(launch.Launch(twin_apis=launch.APIS_WITH_TWINS), base=base_environment)
    assert environment["LD_PRELOAD"] == "/usr/lib/libasan.so.8:/usr/lib/other.so"
    assert launch.environment(launch.Launch(), base=base_environment)["LD_PRELOAD"] == "/usr/lib/other.so"


@pytest.mark.parametrize("api_names", ["", "verbs,nvml", "gpu", ","])
def test_api_without_a_twin_is_a_usage_error(api_names: str) -> None:
    with pytest.raises(UsageError, match=r"cuda, (\w+, )*verbs"):
        launch.parse_apis(api_names)


def test_twin_that_is_not_installed_is_missing_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDRKIT_TWINS_LIB", str(tmp_path))
    assert launch.twins_available() == frozenset()
    with pytest.raises(SetupMissing, match="pip install the wheel of gdrkit_twins"):
        launch.environment(launch.Launch(twin_apis=launch.APIS_WITH_TWINS), base={})


@NEEDS_TWINS
def test_run_executes_the_command_with_the_twins() -> None:
    process = run_gdrkit(
        "run", "--software", "--seed", "5", "--", sys.executable, "-c", PRINT_ENVIRONMENT_PROGRAM, LD_LIBRARY_PATH=""
    )
    library_path, seed = process.stdout.split()
    assert seed == "5"
    assert library_path.count(":") == len(launch.APIS_WITH_TWINS) - 1
    assert process.returncode == 0


# perftest opens libcuda by the name libcuda.so. The program below fails unless this name leads to the twin, too.
OPEN_LIBCUDA_PROGRAM = """
import ctypes
libraries = [ctypes.CDLL(name) for name in ("libcuda.so", "libcuda.so.1")]
assert libraries[0]._handle == libraries[1]._handle
assert libraries[0].gdrkit_twin_ledger
"""


@NEEDS_TWINS
def test_libcuda_without_a_version_is_the_twin() -> None:
    process = run_gdrkit("run", "--software", "--quiet", "--", sys.executable, "-c", OPEN_LIBCUDA_PROGRAM)
    assert process.returncode == 0, process.stderr


@NEEDS_TWINS
@pytest.mark.parametrize(
    ("command", "exit_code", "expected_error"),
    [
        (["sh", "-c", "exit 9"], 9, ""),
        (["sh", "-c", "kill -TERM $$"], -signal.SIGTERM, ""),
        (["no such command"], 127, "No such file or directory (ENOENT)"),
        (["/proc/self/status"], 126, "Permission denied (EACCES)"),
    ],
)
def test_exit_code_is_that_of_the_command(command: list[str], exit_code: int, expected_error: str) -> None:
    process = run_gdrkit("run", "--software", "--quiet", "--", *command)
    assert process.returncode == exit_code
    assert expected_error in process.stderr
    assert len(process.stderr.splitlines()) == (1 if expected_error else 0)


def test_malformed_fault_plan_is_refused_before_the_command_runs(tmp_path: Path) -> None:
    plan_path = tmp_path / "plan"
    plan_path.write_text("gdrkit-faults 1\nibv_reg_mr call=maybe errno=EFAULT\n")
    process = run_gdrkit("run", "--software", "--faults", str(plan_path), "--", "sh", "-c", f"touch {tmp_path}/ran")
    assert process.returncode == 2
    error_line = process.stderr.strip().splitlines()[-1]
    for error_part in (
        "twins: read fault plan",
        "Invalid argument (EINVAL)",
        "line=2",
        "call=maybe",
        "To do: fix line 2",
    ):
        assert error_part in error_line
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "arguments",
    [["run", "--", "true"], ["run", "--software"], ["run", "--software", "--apis", "gpu", "--", "true"], ["nothing"]],
    ids=" ".join,
)
def test_usage_error_exits_with_2_and_the_reason(arguments: list[str]) -> None:
    process = run_gdrkit(*arguments)
    assert process.returncode == 2
    assert process.stderr
    assert "Traceback" not in process.stderr


def test_missing_twins_exit_with_3(tmp_path: Path) -> None:
    process = run_gdrkit("run", "--software", "--", "true", GDRKIT_TWINS_LIB=str(tmp_path))
    assert process.returncode == 3
    assert "To do: pip install" in process.stderr


def test_traceback_is_printed_on_request(tmp_path: Path) -> None:
    variables = {"GDRKIT_TWINS_LIB": str(tmp_path), "GDRKIT_TRACEBACK": "1"}
    assert "Traceback" in run_gdrkit("run", "--software", "--", "true", **variables).stderr


# The program adds to gdrkit a command that fails with EPIPE, and runs this command. click ends the process without a
# message if it catches an OSError with EPIPE, so gdrkit must print the error itself.
FAILING_COMMAND_PROGRAM = """
import errno
from gdrkit import cli
from gdrkit.errors import Api, ApiError
@cli.cli.command()
def fail():
    raise ApiError(api=Api.KERNEL, operation="read", status=32, status_name="EPIPE", errno=errno.EPIPE)
cli.main(["fail"])
"""


@pytest.mark.parametrize("traceback_variable", ["", "1"])
def test_error_with_epipe_is_printed(traceback_variable: str) -> None:
    environment = {**os.environ, "GDRKIT_TRACEBACK": traceback_variable}
    command = [sys.executable, "-c", FAILING_COMMAND_PROGRAM]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr.endswith("kernel: read() failed: Broken pipe (EPIPE)\n")
    assert ("Traceback" in process.stderr) == bool(traceback_variable)


def test_facts_and_version_print_their_output() -> None:
    assert run_gdrkit("version").stdout.startswith("gdrkit 0.")
    assert '"schema_version": 1' in run_gdrkit("facts", "--no-apis", "--json").stdout
    assert "Kernel" in run_gdrkit("facts", "--no-apis").stdout
