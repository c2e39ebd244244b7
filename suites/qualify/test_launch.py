"""The command `gdrkit run`, and the environment that selects the substrate of a child process."""

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

BOTH = needs(software(Api.VERBS), software(Api.CUDA))
PRINT_ENVIRONMENT = "import os; print(os.environ.get('LD_LIBRARY_PATH', ''), os.environ['GDRKIT_TWINS_SEED'])"


def gdrkit(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-m", "gdrkit", *arguments], env=environ, capture_output=True, text=True, check=False
    )


@BOTH
def test_library_path_begins_with_the_selected_twins() -> None:
    with_all = launch.environment(launch.Launch(software=launch.TWINNED), base={"LD_LIBRARY_PATH": "/opt/lib"})
    folders = with_all["LD_LIBRARY_PATH"].split(":")
    count = len(launch.TWINNED)
    assert folders[count:] == ["/opt/lib"]
    assert {Path(folder).name for folder in folders[:count]} >= {"cuda", "hlthunk", "ibverbs"}
    with_cuda = launch.environment(launch.Launch(software=frozenset({Api.CUDA})), base=with_all)
    assert [Path(folder).name for folder in with_cuda["LD_LIBRARY_PATH"].split(":")] == ["cuda", "lib"]
    assert launch.environment(launch.Launch(), base=with_all)["LD_LIBRARY_PATH"] == "/opt/lib"
    assert "LD_LIBRARY_PATH" not in launch.environment(launch.Launch(), base={})


@BOTH
def test_domain_is_shared_unless_the_launch_is_isolated() -> None:
    shared = launch.Launch(software=launch.TWINNED)
    assert "GDRKIT_TWINS_DOMAIN" not in launch.environment(shared, base={})
    joined = launch.environment(shared, base={"GDRKIT_TWINS_DOMAIN": "lab"})
    assert joined["GDRKIT_TWINS_DOMAIN"] == "lab"
    named = launch.Launch(software=launch.TWINNED, domain="job")
    assert launch.environment(named, base={})["GDRKIT_TWINS_DOMAIN"] == "job"
    isolated = launch.Launch(software=launch.TWINNED, isolated=True)
    domains = {
        launch.environment(isolated, base={"GDRKIT_TWINS_DOMAIN": "lab"})["GDRKIT_TWINS_DOMAIN"] for _ in range(3)
    }
    assert len(domains - {"lab"}) == 3
    assert all(len(domain) <= 32 for domain in domains)
    with pytest.raises(UsageError, match="'lab'"):
        launch.environment(launch.Launch(software=launch.TWINNED, domain="lab", isolated=True), base={})


@BOTH
def test_seed_is_random_unless_it_is_given() -> None:
    with_seed = launch.Launch(software=launch.TWINNED, seed=7)
    assert launch.environment(with_seed, base={})["GDRKIT_TWINS_SEED"] == "7"
    random_seed = launch.environment(launch.Launch(software=launch.TWINNED), base={})["GDRKIT_TWINS_SEED"]
    assert 0 <= int(random_seed) < 2**64
    with pytest.raises(UsageError):
        launch.environment(launch.Launch(software=launch.TWINNED, seed=2**64), base={})


@BOTH
def test_sanitizer_runtime_is_preloaded_first() -> None:
    base = {"GDRKIT_TWINS_PRELOAD": "/usr/lib/libasan.so.8", "LD_PRELOAD": "/usr/lib/other.so"}
    child = launch.environment(launch.Launch(software=launch.TWINNED), base=base)
    assert child["LD_PRELOAD"] == "/usr/lib/libasan.so.8:/usr/lib/other.so"
    assert launch.environment(launch.Launch(), base=base)["LD_PRELOAD"] == "/usr/lib/other.so"


@pytest.mark.parametrize("text", ["", "verbs,nvml", "gpu", ","])
def test_api_without_a_twin_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"cuda, (\w+, )*verbs"):
        launch.parse_apis(text)


def test_twin_that_is_not_installed_is_missing_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDRKIT_TWINS_LIB", str(tmp_path))
    assert launch.twins_available() == frozenset()
    with pytest.raises(SetupMissing, match=r"pip install 'gdrkit\[software\]'"):
        launch.environment(launch.Launch(software=launch.TWINNED), base={})


@BOTH
def test_run_executes_the_command_with_the_twins() -> None:
    ended = gdrkit(
        "run", "--software", "--seed", "5", "--", sys.executable, "-c", PRINT_ENVIRONMENT, LD_LIBRARY_PATH=""
    )
    path, seed = ended.stdout.split()
    assert seed == "5"
    assert path.count(":") == len(launch.TWINNED) - 1
    assert ended.returncode == 0


@BOTH
@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        (["sh", "-c", "exit 9"], 9, ""),
        (["sh", "-c", "kill -TERM $$"], -signal.SIGTERM, ""),
        (["no such command"], 127, "No such file or directory (ENOENT)"),
        (["/proc/self/status"], 126, "Permission denied (EACCES)"),
    ],
)
def test_exit_code_is_that_of_the_command(command: list[str], code: int, error: str) -> None:
    ended = gdrkit("run", "--software", "--", *command)
    assert ended.returncode == code
    assert error in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if "leaves" not in line]
    assert len(lines) == (1 if error else 0)


def test_malformed_fault_plan_is_refused_before_the_command_runs(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text("gdrkit-faults 1\nibv_reg_mr call=maybe errno=EFAULT\n")
    ended = gdrkit("run", "--software", "--faults", str(plan), "--", "sh", "-c", f"touch {tmp_path}/ran")
    assert ended.returncode == 2
    error = ended.stderr.strip().splitlines()[-1]
    for part in ("twins: read fault plan", "Invalid argument (EINVAL)", "line=2", "call=maybe", "To do: fix line 2"):
        assert part in error
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "arguments",
    [["run", "--", "true"], ["run", "--software"], ["run", "--software", "--apis", "gpu", "--", "true"], ["nothing"]],
    ids=" ".join,
)
def test_usage_error_exits_with_2_and_the_reason(arguments: list[str]) -> None:
    ended = gdrkit(*arguments)
    assert ended.returncode == 2
    assert ended.stderr
    assert "Traceback" not in ended.stderr


def test_missing_twins_exit_with_3(tmp_path: Path) -> None:
    ended = gdrkit("run", "--software", "--", "true", GDRKIT_TWINS_LIB=str(tmp_path))
    assert ended.returncode == 3
    assert "To do: pip install" in ended.stderr


def test_traceback_is_printed_on_request(tmp_path: Path) -> None:
    variables = {"GDRKIT_TWINS_LIB": str(tmp_path), "GDRKIT_TRACEBACK": "1"}
    assert "Traceback" in gdrkit("run", "--software", "--", "true", **variables).stderr


FAILING_COMMAND = """
import errno
from gdrkit import cli
from gdrkit.errors import Api, ApiError
@cli.cli.command()
def fail():
    raise ApiError(api=Api.KERNEL, operation="read", status=32, status_name="EPIPE", errno=errno.EPIPE)
cli.main(["fail"])
"""


@pytest.mark.parametrize("traceback", ["", "1"])
def test_error_with_epipe_is_printed(traceback: str) -> None:
    variables = {**os.environ, "GDRKIT_TRACEBACK": traceback}
    command = [sys.executable, "-c", FAILING_COMMAND]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith("kernel: read() failed: Broken pipe (EPIPE)\n")
    assert ("Traceback" in ended.stderr) == bool(traceback)


def test_facts_and_version_print_their_output() -> None:
    assert gdrkit("version").stdout.startswith("gdrkit 0.")
    assert '"schema_version": 1' in gdrkit("facts", "--no-apis", "--json").stdout
    assert "Kernel" in gdrkit("facts", "--no-apis").stdout
