"""The exception tree: codes stay numbers, and errors keep their arguments, advice and causes."""

from __future__ import annotations

import errno
import pickle
from typing import Any

import pytest

from gdrkit import errors
from gdrkit.errors import Api, ApiError, Reason


def _refused() -> ApiError:
    return ApiError(
        api=Api.VERBS,
        operation="ibv_reg_dmabuf_mr",
        status=errno.EINVAL,
        status_name="EINVAL",
        errno=errno.EINVAL,
        arguments={"fd": 7, "length_bytes": 65536},
        reason=Reason.BAD_ARGUMENT,
        what_to_do="pass a dma-buf",
        detail="the descriptor is a plain file",
    )


def test_api_error_has_its_details_as_fields() -> None:
    error = _refused()
    assert (error.api, error.operation, error.status, error.errno) == (Api.VERBS, "ibv_reg_dmabuf_mr", 22, 22)
    assert error.arguments["length_bytes"] == 65536
    assert error.reason is Reason.BAD_ARGUMENT


def test_api_error_text_has_every_field() -> None:
    text = str(_refused())
    for part in (
        "verbs",
        "ibv_reg_dmabuf_mr",
        "fd=7",
        "length_bytes=65536",
        "EINVAL",
        "Invalid argument",
        "plain file",
        "pass a dma-buf",
    ):
        assert part in text


def test_api_error_arguments_are_read_only() -> None:
    with pytest.raises(TypeError):
        _refused().arguments["fd"] = 8  # type: ignore[index]


def test_errno_is_none_if_the_api_returned_none() -> None:
    error = ApiError(api=Api.CUDA, operation="cuMemAlloc", status=2, status_name="CUDA_ERROR_OUT_OF_MEMORY")
    assert error.errno is None
    assert error.status == 2


@pytest.mark.parametrize(
    ("number", "name"),
    [(errno.EOPNOTSUPP, "EOPNOTSUPP"), (524, "ENOTSUPP"), (None, "no errno"), (99999, "errno 99999")],
)
def test_every_errno_has_a_name(number: int | None, name: str) -> None:
    assert errors.errno_name(number) == name


def test_kinds_of_failure_have_separate_classes() -> None:
    assert issubclass(errors.Unsupported, ApiError)
    assert issubclass(errors.SetupMissing, ApiError)
    for kind in (
        errors.UsageError,
        errors.ClosedResource,
        errors.BrokenResource,
        errors.DataMismatch,
        errors.LeakDetected,
    ):
        assert issubclass(kind, errors.GdrkitError)
        assert not issubclass(kind, ApiError)
    assert issubclass(errors.GdrkitWarning, ResourceWarning)


def test_registration_failed_has_its_causes_in_order() -> None:
    first, second = _refused(), errors.UsageError("no")
    error = errors.RegistrationFailed("no way", causes=(first, second), reason=Reason.NO_ROUTE)
    assert error.causes == (first, second)
    assert str(error).index("EINVAL") < str(error).index("[2] no")


def test_leak_error_counts_handles_by_kind() -> None:
    error = errors.LeakDetected({"verbs.region": 2, "memory.cuda": 1})
    assert error.handles == {"verbs.region": 2, "memory.cuda": 1}
    assert "2 verbs.region" in str(error)


def test_reason_values_are_stable() -> None:
    values = [reason.value for reason in Reason]
    assert len(values) == len(set(values))
    assert all(value == reason.name.lower() for value, reason in zip(values, Reason, strict=True))
    assert pickle.loads(pickle.dumps(Reason.PEER_GONE)) is Reason.PEER_GONE  # noqa: S301 - our own bytes.


FIELDS = {
    "api": Api.VERBS,
    "operation": "ibv_reg_mr",
    "status": 14,
    "status_name": "EFAULT",
    "errno": 14,
    "arguments": {"length_bytes": 5},
    "reason": Reason.PEER_MEMORY_UNSUPPORTED,
    "what_to_do": "load a module",
    "detail": "detail",
}


class _SystemError(ApiError, OSError):
    """An error that is also an OSError, like those of usrbio. Fields of OSError are not in ``__dict__``."""

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401 - the fields of ApiError have many types.
        super().__init__(**fields)
        self.errno: int | None = fields["errno"]
        self.strerror = fields["detail"]


def _kinds() -> list[errors.GdrkitError]:
    return [
        ApiError(**FIELDS),  # type: ignore[arg-type]
        _SystemError(**FIELDS),
        errors.UsageError("wrong", reason=Reason.NO_DEVICE, what_to_do="right"),
        errors.ClosedResource("queue pair"),
        errors.DataMismatch(first_offset_bytes=3, expected=b"1", actual=b"2", length_bytes=9),
        errors.RegistrationFailed("no way", causes=(errors.UsageError("wrong"),), reason=Reason.NO_ROUTE),
        errors.LeakDetected({"verbs.region": 2}),
    ]


@pytest.mark.parametrize("error", _kinds(), ids=lambda error: type(error).__name__)
def test_fresh_error_has_all_fields_and_no_traceback(error: errors.GdrkitError) -> None:
    error.add_note("a note")
    try:
        raise error from _refused()
    except errors.GdrkitError as caught:
        again = caught.fresh()
    assert type(again) is type(error)
    assert again is not error
    assert (str(again), again.args, again.__notes__) == (str(error), error.args, ["a note"])
    assert again.__notes__ is not error.__notes__
    mine, theirs = vars(again) | {"causes": (), "__notes__": []}, vars(error) | {"causes": (), "__notes__": []}
    assert mine == theirs
    assert (again.__traceback__, again.__cause__, again.__context__) == (None, None, None)
    if isinstance(error, OSError) and isinstance(again, OSError):
        assert (again.errno, again.strerror) == (error.errno, error.strerror)
    if isinstance(error, errors.RegistrationFailed) and isinstance(again, errors.RegistrationFailed):
        assert again.causes[0] is not error.causes[0]
