"""Start a program on software twins (libraries that emulate the hardware), with a plan of faults to inject.

The plan shows the format. The program only lists the NICs, so the registration that would fail does not occur.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from gdrkit import faultplan, host, launch
from gdrkit.errors import Api

PLAN = """\
gdrkit-faults 1
ibv_reg_dmabuf_mr  call=1  errno=EOPNOTSUPP
"""
PROGRAM = "from gdrkit import verbs; print([info.name for info in verbs.list_nics()])"

print("twins:", sorted(api.value for api in launch.twins_available()))
print(
    "hardware that a twin would replace:", launch.describe_hardware_replaced_by_twins(launch.Launch(), host.HostTree())
)
assert launch.parse_apis("verbs,cuda") == {Api.VERBS, Api.CUDA}
assert launch.api_of_library("/usr/lib/libibverbs.so.1") is Api.VERBS

with tempfile.TemporaryDirectory() as folder:
    plan_path = Path(folder) / "plan"
    plan_path.write_text(PLAN)
    assert faultplan.read_plan(plan_path) == faultplan.parse_plan(PLAN)
    # isolated=True: the twins of this program do not see the twins of other processes.
    launch_settings = launch.Launch(twin_apis=launch.APIS_WITH_TWINS, seed=7, faults=plan_path, isolated=True)
    # The environment sets variables of the dynamic loader, so that the child process loads the twins.
    environment = launch.environment(launch_settings)
    command = [sys.executable, "-c", PROGRAM]
    print(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip())
