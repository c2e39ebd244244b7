"""Tests of the two parsers of fault plans, in gdrkit and in the software twins. Both must accept the same plans.

Software twins are libraries that emulate the hardware below an API. A fault plan is a file that tells the twins which
calls to fail or to delay.
"""

from __future__ import annotations

import errno

import pytest

from gdrkit import launch
from gdrkit.errors import Api, ApiError, Reason
from gdrkit.faultplan import FaultRule, parse_plan, read_plan
from gdrkit.harness.needs import needs, software

PLAN_HEADER = "gdrkit-faults 1\n"

# Each entry has the rules of a plan, without the header.
VALID_PLANS = {
    "empty": "",
    "comments": "# a comment\n\n   \nibv_reg_mr call=1 errno=14 # why\n",
    "by name": "ibv_reg_dmabuf_mr  call=2     errno=EOPNOTSUPP\n",
    "every call": "ibv_reg_mr\tcall=*\terrno=14",
    "range": "ibv_reg_mr call=1-3 errno=4095\n",
    "order": "ibv_reg_mr errno=EFAULT call=7\n",
    "completion": "wc.rdma_write call=1 status=12\n",
    "kernel errno": "ibv_reg_mr call=1 errno=ENOTSUPP\n",
    "delayed": "ibv_reg_mr call=1 delay_us=5\n",
    "delayed and failing": "ibv_reg_mr delay_us=5 call=1 errno=14\n",
    "held": "ibv_reg_mr call=1 hold=/no/such/file errno=14\n",
    "stopped": "ibv_reg_mr call=* stop=/no/such/file\n",
    "silent loss": "wc.rdma_write call=* status=0\nwc.rdma_read call=* status=0\n",
    "after the transfer": "wc.rdma_read.landed call=1 status=12\n",
    "rule of another twin": "cuMemAlloc_v2 call=1 status=2\n",
    "of one NIC": "ibv_reg_dmabuf_mr call=* errno=14 nic=twin1\nwc.rdma_read nic=twin0 call=* delay_us=5\n",
}
# Each entry has the rules of a plan, and the number of the line that is malformed. The header is line 1.
MALFORMED_PLANS = {
    "code missing": ("ibv_reg_mr call=1\n", 2),
    "call missing": ("ibv_reg_mr errno=14\n", 2),
    "call zero": ("ibv_reg_mr call=0 errno=14\n", 2),
    "call backwards": ("ibv_reg_mr call=3-1 errno=14\n", 2),
    "call open": ("ibv_reg_mr call=3- errno=14\n", 2),
    "call not a number": ("ibv_reg_mr call=first errno=14\n", 2),
    "call negative": ("ibv_reg_mr call=-1 errno=14\n", 2),
    "call twice": ("ibv_reg_mr call=1 call=2 errno=14\n", 2),
    "errno unknown": ("ibv_reg_mr call=1 errno=ENOTHING\n", 2),
    "errno zero": ("ibv_reg_mr call=1 errno=0\n", 2),
    "errno large": ("ibv_reg_mr call=1 errno=4096\n", 2),
    "status for verbs": ("ibv_reg_mr call=1 status=14\n", 2),
    "named status": ("wc.rdma_write call=1 status=EIO\n", 2),
    "silent loss of a message": ("wc.send call=1 status=0\n", 2),
    "completion unknown": ("wc.rdma_wrote call=1 status=12\n", 2),
    "delay zero": ("ibv_reg_mr call=1 delay_us=0\n", 2),
    "delay large": ("ibv_reg_mr call=1 delay_us=10000001\n", 2),
    "delay twice": ("ibv_reg_mr call=1 delay_us=1 delay_us=2\n", 2),
    "hold relative": ("ibv_reg_mr call=1 hold=here\n", 2),
    "hold twice": ("ibv_reg_mr call=1 hold=/a hold=/b\n", 2),
    "stop relative": ("ibv_reg_mr call=1 stop=here\n", 2),
    "stop empty": ("ibv_reg_mr call=1 stop=\n", 2),
    "stop twice": ("ibv_reg_mr call=1 stop=/a stop=/b\n", 2),
    "word too much": ("ibv_reg_mr call=1 errno=14 please\n", 2),
    "blank inside": ("ibv_reg_mr call= 1 errno=14\n", 2),
    "NIC of a call without NIC": ("ibv_open_device call=1 errno=14 nic=twin0\n", 2),
    "NIC empty": ("ibv_reg_mr call=1 errno=14 nic=\n", 2),
    "NIC twice": ("ibv_reg_mr call=1 errno=14 nic=a nic=b\n", 2),
    "NIC without effect": ("ibv_reg_mr call=1 nic=twin0\n", 2),
    "third line": ("ibv_reg_mr call=1 errno=14\n\nibv_reg_mr call=x errno=14\n", 4),
}


@pytest.mark.parametrize("plan_name", VALID_PLANS)
def test_valid_plan_is_accepted(plan_name: str) -> None:
    parse_plan(PLAN_HEADER + VALID_PLANS[plan_name])


@pytest.mark.parametrize("plan_name", MALFORMED_PLANS)
def test_malformed_plan_is_an_error_with_its_line(plan_name: str) -> None:
    rules_text, line_number = MALFORMED_PLANS[plan_name]
    with pytest.raises(ApiError) as error_info:
        parse_plan(PLAN_HEADER + rules_text)
    error = error_info.value
    assert (error.api, error.operation, error.errno) == (Api.TWINS, "read fault plan", errno.EINVAL)
    assert error.reason is Reason.MALFORMED
    assert error.arguments["line"] == line_number
    assert f"line {line_number}" in error.what_to_do


@pytest.mark.parametrize(
    "plan_text", ["", "# only a comment\n", "gdrkit-faults 2\n", "ibv_reg_mr call=1 errno=14\n", "\0"]
)
def test_plan_without_its_version_is_refused(plan_text: str) -> None:
    with pytest.raises(ApiError, match="gdrkit-faults 1"):
        parse_plan(plan_text)


def test_function_without_a_twin_is_refused() -> None:
    """Each twin ignores rules for functions of other libraries, so only gdrkit can refuse a rule for malloc."""
    with pytest.raises(ApiError, match="malloc"):
        parse_plan(PLAN_HEADER + "malloc call=1 errno=12\n")


@pytest.mark.parametrize(
    ("fault_point", "status_min", "status_max"),
    [
        ("cuMemAlloc_v2", 1, 4095),
        ("wc.send", 1, 4095),
        ("wc.rdma_write", 0, 4095),
        ("wc.rdma_read.landed", 1, 4095),
        ("cuFileRead", 1, 5050),
        ("cufile.async_io", 0, 5050),
    ],
)
def test_status_limits_are_those_in_the_error(fault_point: str, status_min: int, status_max: int) -> None:
    """A status is at most 5050 for cuFile (the largest CUfileOpError) and at most 4095 elsewhere.

    0 is allowed only where a transfer can succeed without moving bytes.
    """
    for status in (status_min, status_max):
        assert parse_plan(f"{PLAN_HEADER}{fault_point} call=1 status={status}\n")[0].code == status
    for status in (status_min - 1, status_max + 1):
        with pytest.raises(ApiError, match=f"expected a number from {status_min} to {status_max} after status="):
            parse_plan(f"{PLAN_HEADER}{fault_point} call=1 status={status}\n")


def test_parsed_rule_has_the_calls_and_code_of_its_line() -> None:
    assert parse_plan(PLAN_HEADER + "ibv_reg_mr call=2-4 errno=EFAULT\ncuInit call=* status=3\n") == (
        FaultRule("ibv_reg_mr", 2, 4, "errno", errno.EFAULT),
        FaultRule("cuInit", 1, None, "status", 3),
    )


def test_unreadable_plan_has_the_errno_of_the_kernel() -> None:
    with pytest.raises(ApiError) as error_info:
        read_plan("/proc/self/never there")
    assert error_info.value.errno == errno.ENOENT


@needs(software(Api.VERBS))
@pytest.mark.parametrize("plan_name", [*VALID_PLANS, *MALFORMED_PLANS])
def test_twin_has_the_same_grammar(plan_name: str, capfd: pytest.CaptureFixture[str]) -> None:
    from gdrkit import verbs

    verbs.list_nics()  # This call loads the twin.
    if plan_name in VALID_PLANS:
        launch.twin_control().set_faults("verbs", PLAN_HEADER + VALID_PLANS[plan_name])
        launch.twin_control().set_faults("verbs", PLAN_HEADER)  # A plan without rules ends all faults.
        return
    rules_text, line_number = MALFORMED_PLANS[plan_name]
    with pytest.raises(OSError, match="malformed") as error_info:
        launch.twin_control().set_faults("verbs", PLAN_HEADER + rules_text)
    assert error_info.value.errno == errno.EINVAL
    assert f"line {line_number}" in capfd.readouterr().err
