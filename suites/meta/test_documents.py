"""The programs and commands in docs/*.md run on the software twins and print what the documents state.

Software twins are libraries that emulate the hardware below an API.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PROJECT_ROOT = Path(__file__).resolve().parents[2]
CODE_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# SCRIPT_START is the start of every script. It creates the FIFO `output`, to which a service prints. In docs/usrbio.md,
# $D is the folder with the header and the library. START_AGENT and START_SERVER start a service in the background, and
# wait for its first line. TERMINATE_SERVICE ends the service. The exit code of the service becomes the exit code of the
# script.
SCRIPT_START = """
set -e
python() { "$PYTHON" "$@"; }
mkfifo output
mkdir store
D=$(python -c 'import gdrkit.usrbio, os; print(os.path.dirname(gdrkit.usrbio.__file__))')
"""
WAIT_UNTIL_READY = "exec 3< output; read -r line <&3\n"
START_AGENT = f'"$PYTHON" -m gdrkit agent store --store store > output &\n{WAIT_UNTIL_READY}'
START_SERVER = f'"$PYTHON" -m gdrkit serve --store store --listen 127.0.0.1:0 > output &\n{WAIT_UNTIL_READY}'
TERMINATE_SERVICE = "kill $!; wait $!\n"


def read_blocks(document: str, language: str) -> list[str]:
    """Return the code blocks of a document in this language."""
    all_blocks = CODE_BLOCK.findall((PROJECT_ROOT / "docs" / document).read_text())
    return [code for block_language, code in all_blocks if block_language == language]


def is_in_document(output: str, document: str) -> bool:
    """Return whether a document shows exactly this output as an indented block."""
    indented_output = "".join(f"    {line}\n" for line in output.splitlines())
    return indented_output in (PROJECT_ROOT / "docs" / document).read_text()


def run_on_twins(script: str, folder: Path) -> str:
    """Run a shell script on the twins, and return its output."""
    launcher = [sys.executable, "-m", "gdrkit", "run", "--software", "--isolated", "--"]
    command = [*launcher, "env", f"PYTHON={sys.executable}", "bash"]
    (folder / "script").write_text(SCRIPT_START + script)
    result = subprocess.run([*command, "script"], cwd=folder, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("block_index", "expected_output"), [(0, "0 4096\n"), (1, "65536 b'0123456789abcdef'\n")], ids=["host", "device"]
)
def test_python_programs_of_usrbio_run(tmp_path: Path, block_index: int, expected_output: str) -> None:
    (tmp_path / "program.py").write_text(read_blocks("usrbio.md", "python")[block_index])
    (tmp_path / "data").write_bytes(b"0123456789abcdef" * 65536)
    script = f"mv data store\n{START_AGENT}python program.py store store/data\n{TERMINATE_SERVICE}"
    assert expected_output in run_on_twins(script, tmp_path)


def test_c_program_of_usrbio_copies_a_file(tmp_path: Path) -> None:
    (source,) = read_blocks("usrbio.md", "c")
    (tmp_path / "copy.c").write_text(source)
    document_text = (PROJECT_ROOT / "docs" / "usrbio.md").read_text()
    (compile_line,) = re.findall(r"^    (cc copy\.c .*)$", document_text, re.MULTILINE)
    create_data_command = "head -c 3000001 /dev/urandom > store/data\n"
    copy_and_compare_commands = "./copy store store/data store/copy\ncmp store/data store/copy\n"
    assert "3000001 bytes" in run_on_twins(
        f"{compile_line}\n{create_data_command}{START_AGENT}{copy_and_compare_commands}{TERMINATE_SERVICE}", tmp_path
    )


def test_storage_program_prints_the_documented_output(tmp_path: Path) -> None:
    (program,) = read_blocks("storage.md", "python")
    (tmp_path / "store.py").write_text(program)
    # `line` is the first line of the server: gdrkit serve: DIR at HOST:PORT by NICS
    client_commands = 'line=${line##* at }\npython store.py "${line%% by *}" store/.gdrkit/token\n'
    assert is_in_document(run_on_twins(f"{START_SERVER}{client_commands}{TERMINATE_SERVICE}", tmp_path), "storage.md")


@pytest.mark.parametrize("document", ["gaudi.md", "registration.md"])
def test_first_program_of_the_document_runs(tmp_path: Path, document: str) -> None:
    (tmp_path / "program.py").write_text(read_blocks(document, "python")[0])
    assert run_on_twins("python program.py\n", tmp_path) == ""


def run_in_two_shells(document: str, documented_service: str, documented_client: str, folder: Path) -> str:
    """Run two commands of a document, a service and its client, in two shells, and return the output of the client.

    Each command has the prefix that the document requires. DIR is replaced by the folder `store`.
    """
    document_text = (PROJECT_ROOT / "docs" / document).read_text()
    (prefix,) = re.findall(r"put\s+`([^`]+ --)`\s+before\s+each\s+command", document_text)
    for command in (documented_service, documented_client):
        assert re.search(rf"(^    |`){re.escape(command)}( {{2}}|`|$)", document_text, re.MULTILINE), command
    # The commands of the document have a fixed port, which is replaced by a free port.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    service_command, client_command = (
        f"{prefix} {command}".replace("DIR", "store").replace("7070", port)
        for command in (documented_service, documented_client)
    )
    # A new shell does not have the variable that selects the twin domain of this session.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GDRKIT_TWINS_DOMAIN")}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    with subprocess.Popen(
        ["bash", "-c", f"exec {service_command}"], cwd=folder, env=environ, stdout=subprocess.PIPE
    ) as service_process:
        try:
            assert service_process.stdout is not None
            assert service_process.stdout.readline()
            result = subprocess.run(
                ["bash", "-c", client_command],
                cwd=folder,
                env=environ,
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
        finally:
            service_process.terminate()
        assert service_process.wait(30) == 0
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_storage_commands_work_in_two_shells(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store.py").write_text(read_blocks("storage.md", "python")[0])
    server_command = "gdrkit serve --store DIR --listen 0.0.0.0:7070"
    client_command = "python store.py 127.0.0.1:7070 DIR/.gdrkit/token"
    assert is_in_document(run_in_two_shells("storage.md", server_command, client_command, tmp_path), "storage.md")


def test_usrbio_commands_work_in_two_shells(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "input").write_bytes(b"0123456789abcdef" * 65536)
    (tmp_path / "read.py").write_text(read_blocks("usrbio.md", "python")[0])
    output = run_in_two_shells("usrbio.md", "gdrkit agent DIR --store DIR", "python read.py DIR DIR/input", tmp_path)
    assert output.splitlines()[-1] == "b'0123456789abcdef'"


def test_gds_program_prints_the_documented_output(tmp_path: Path) -> None:
    (program,) = read_blocks("gds.md", "python")
    (tmp_path / "program.py").write_text(program)
    assert is_in_document(run_on_twins("python program.py .\n", tmp_path), "gds.md")


def test_model_program_prints_the_documented_output(tmp_path: Path) -> None:
    program = read_blocks("models.md", "python")[0]
    (tmp_path / "program.py").write_text(program)
    assert is_in_document(run_on_twins("python program.py\n", tmp_path), "models.md")


def test_cufile_program_prints_why_it_was_not_direct(tmp_path: Path) -> None:
    (program,) = read_blocks("cufile.md", "python")
    (tmp_path / "program.py").write_text(program)
    # The file must be on a disk, and /tmp may be in memory.
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as data:
        data.write(bytes(1 << 20))
        data.flush()
        output = run_on_twins(f"python program.py {data.name}\n", tmp_path)
    assert output.startswith("1048576 bytes\nfell_back by posix\n")
    assert "- no_nvidia_fs: nvidia-fs is not loaded. To do: load nvidia-fs" in output


def test_tiers_program_prints_the_documented_output(tmp_path: Path) -> None:
    document_text = (PROJECT_ROOT / "docs" / "tiers.md").read_text()
    (program,) = read_blocks("tiers.md", "python")
    (tmp_path / "program.py").write_text(program)
    (command_line,) = re.findall(r"^`(python program\.py .*?)`", document_text, re.MULTILINE)
    for name in ("fast", "medium", "slow"):
        (tmp_path / name).mkdir()
    assert is_in_document(run_on_twins(f"{command_line}\n", tmp_path), "tiers.md")


def test_tiers_configuration_is_valid(tmp_path: Path) -> None:
    (configuration,) = read_blocks("tiers.md", "toml")
    (tmp_path / "tiers.toml").write_text(configuration)
    command = [sys.executable, "-m", "gdrkit", "tiers", "status", "--config", "tiers.toml"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    # With a valid configuration, the command fails only at the check of the mounts, which are missing here.
    assert (result.returncode, "mount it" in result.stderr) == (3, True), result.stderr
