"""Errors of gdrkit have numeric codes, and keep their arguments, advice and causes when they are copied."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from gdrkit import errors
from gdrkit.errors import Api, ApiError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable


def _make_verbs_error() -> ApiError:
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
    error = _make_verbs_error()
    assert (error.api, error.operation, error.status, error.errno) == (Api.VERBS, "ibv_reg_dmabuf_mr", 22, 22)
    assert error.arguments["length_bytes"] == 65536
    assert error.reason is Reason.BAD_ARGUMENT


def test_api_error_text_has_every_field() -> None:
    error_text = str(_make_verbs_error())
    for expected_part in (
        "verbs",
        "ibv_reg_dmabuf_mr",
        "fd=7",
        "length_bytes=65536",
        "EINVAL",
        "Invalid argument",
        "plain file",
        "pass a dma-buf",
    ):
        assert expected_part in error_text


def test_api_error_arguments_are_read_only() -> None:
    with pytest.raises(TypeError):
        _make_verbs_error().arguments["fd"] = 8  # type: ignore[index]


def test_errno_is_none_if_the_api_returned_none() -> None:
    error = ApiError(api=Api.CUDA, operation="cuMemAlloc", status=2, status_name="CUDA_ERROR_OUT_OF_MEMORY")
    assert error.errno is None
    assert error.status == 2


@pytest.mark.parametrize(
    ("error_number", "expected_name"),
    [(errno.EOPNOTSUPP, "EOPNOTSUPP"), (524, "ENOTSUPP"), (None, "no errno"), (99999, "errno 99999")],
)
def test_every_errno_has_a_name(error_number: int | None, expected_name: str) -> None:
    assert errors.errno_name(error_number) == expected_name


def test_kinds_of_failure_have_separate_classes() -> None:
    assert issubclass(errors.Unsupported, ApiError)
    assert issubclass(errors.SetupMissing, ApiError)
    for error_class in (
        errors.UsageError,
        errors.ClosedResource,
        errors.BrokenResource,
        errors.DataMismatch,
        errors.LeakDetected,
    ):
        assert issubclass(error_class, errors.GdrkitError)
        assert not issubclass(error_class, ApiError)
    assert issubclass(errors.GdrkitWarning, ResourceWarning)


def test_registration_failed_has_its_causes_in_order() -> None:
    first_cause, second_cause = _make_verbs_error(), errors.UsageError("no")
    error = errors.RegistrationFailed("no way", causes=(first_cause, second_cause), reason=Reason.NO_ROUTE)
    assert error.causes == (first_cause, second_cause)
    assert str(error).index("EINVAL") < str(error).index("[2] no")


def test_leak_error_counts_handles_by_kind() -> None:
    error = errors.LeakDetected({"verbs.region": 2, "memory.cuda": 1})
    assert error.handles == {"verbs.region": 2, "memory.cuda": 1}
    assert "2 verbs.region" in str(error)


def test_reason_values_are_stable() -> None:
    reason_values = [reason.value for reason in Reason]
    assert len(reason_values) == len(set(reason_values))
    assert all(value == reason.name.lower() for value, reason in zip(reason_values, Reason, strict=True))
    assert pickle.loads(pickle.dumps(Reason.PEER_GONE)) is Reason.PEER_GONE  # noqa: S301 - this process wrote the bytes.


ERROR_FIELDS = {
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
    """An error class whose objects are always an OSError, like the error class of usrbio.

    The fields of OSError are not in ``__dict__``, so the tests compare them separately.
    """


def _make_kernel_error(error_number: int, error_class: type[ApiError] = ApiError, **fields: Any) -> ApiError:  # noqa: ANN401
    """Return an error of open(2) with the default fields and `fields`, which also replace default fields."""
    default_fields: dict[str, Any] = {
        "api": Api.KERNEL,
        "operation": "open",
        "status": error_number,
        "status_name": errors.errno_name(error_number),
        "errno": error_number,
    }
    return error_class(**(default_fields | fields))


@pytest.mark.parametrize(
    ("error_number", "builtin_class"),
    [
        (errno.ENOENT, FileNotFoundError),
        (errno.EACCES, PermissionError),
        (errno.EPERM, PermissionError),
        (errno.EEXIST, FileExistsError),
        (errno.EAGAIN, BlockingIOError),
        (errno.ETIMEDOUT, TimeoutError),
        (errno.EIO, OSError),
    ],
)
@pytest.mark.parametrize("error_class", [ApiError, errors.SetupMissing, errors.Unsupported, _SystemError])
def test_kernel_error_is_the_builtin_of_its_errno(
    error_number: int, builtin_class: type[OSError], error_class: type[ApiError]
) -> None:
    with pytest.raises(builtin_class) as error_info:
        raise _make_kernel_error(error_number, error_class, arguments={"path": "/data/x"})
    error: Any = error_info.value
    assert isinstance(error, error_class)
    assert isinstance(error, builtin_class)
    assert type(error).__name__ == error_class.__name__
    assert (error.errno, error.strerror, error.filename) == (error_number, os.strerror(error_number), "/data/x")
    assert (
        str(error)
        == f"kernel: open(path='/data/x') failed: {os.strerror(error_number)} ({errors.errno_name(error_number)})"
    )


def test_kernel_errors_of_one_errno_have_one_class() -> None:
    assert type(_make_kernel_error(errno.ENOENT)) is type(_make_kernel_error(errno.ENOENT))


def test_kernel_error_has_its_message_as_argument() -> None:
    error = _make_kernel_error(errno.ENOENT)
    assert error.args == (error.message,) == error.clone().args
    assert repr(error) == f"ApiError({error.message!r})"


@pytest.mark.parametrize(
    ("arguments", "filename"),
    [
        ({"length_bytes": 5}, None),
        ({"tier": "nvme", "name": "a/b"}, "a/b"),
        ({"folder": "/f", "path": "/p"}, "/p"),
        ({"command": "prog"}, "prog"),
    ],
)
def test_filename_is_the_argument_that_names_the_file(arguments: dict[str, object], filename: str | None) -> None:
    error: Any = _make_kernel_error(errno.ENOENT, arguments=arguments)
    assert error.filename == filename


def test_error_of_another_api_is_not_an_os_error() -> None:
    assert not isinstance(_make_verbs_error(), OSError)
    assert not isinstance(_make_kernel_error(errno.ENOENT, api=Api.LOADER), OSError)
    error_without_errno = ApiError(api=Api.KERNEL, operation="read", status=None, status_name="too short")
    assert not isinstance(error_without_errno, OSError)


def test_os_error_without_errno_has_its_detail_as_strerror() -> None:
    error = _SystemError(**(ERROR_FIELDS | {"errno": None, "status": None}))  # type: ignore[arg-type]
    assert (error.errno, error.strerror, error.filename) == (None, "detail", None)


@pytest.mark.parametrize(
    ("detail", "expected_end"),
    [("No such file or directory", "(ENOENT)"), ("no tier has it", "(ENOENT): no tier has it"), ("", "(ENOENT)")],
)
def test_detail_that_repeats_the_errno_is_left_out(detail: str, expected_end: str) -> None:
    error = _make_kernel_error(errno.ENOENT, detail=detail)
    assert str(error).endswith(expected_end)
    assert error.detail == detail


def _make_errors_of_all_classes() -> list[errors.GdrkitError]:
    return [
        ApiError(**ERROR_FIELDS),  # type: ignore[arg-type]
        _SystemError(**ERROR_FIELDS),  # type: ignore[arg-type]
        _make_kernel_error(errno.ENOENT, arguments={"path": "/data/x"}),
        errors.UsageError("wrong", reason=Reason.NO_DEVICE, what_to_do="right"),
        errors.ClosedResource("queue pair"),
        errors.DataMismatch(first_offset_bytes=3, expected=b"1", actual=b"2", length_bytes=9),
        errors.DataMismatch(first_offset_bytes=None, expected=b"1234", actual=b"4321", length_bytes=9),
        errors.RegistrationFailed("no way", causes=(errors.UsageError("wrong"),), reason=Reason.NO_ROUTE),
        errors.LeakDetected({"verbs.region": 2}),
    ]


@pytest.mark.parametrize("error", _make_errors_of_all_classes(), ids=lambda error: type(error).__name__)
def test_cloned_error_has_all_fields_and_no_traceback(error: errors.GdrkitError) -> None:
    error.add_note("a note")
    try:
        raise error from _make_verbs_error()
    except errors.GdrkitError as caught_error:
        clone = caught_error.clone()
    assert type(clone) is type(error)
    assert clone is not error
    assert (str(clone), clone.args, clone.__notes__) == (str(error), error.args, ["a note"])
    assert clone.__notes__ is not error.__notes__
    # A clone has copies of the causes and notes, which other assertions of this case compare.
    clone_fields, original_fields = (
        vars(clone) | {"causes": (), "__notes__": []},
        vars(error) | {"causes": (), "__notes__": []},
    )
    assert clone_fields == original_fields
    assert (clone.__traceback__, clone.__cause__, clone.__context__) == (None, None, None)
    if isinstance(error, OSError) and isinstance(clone, OSError):
        assert (clone.errno, clone.strerror, clone.filename) == (error.errno, error.strerror, error.filename)
    if isinstance(error, errors.RegistrationFailed) and isinstance(clone, errors.RegistrationFailed):
        assert clone.causes[0] is not error.causes[0]


@pytest.mark.parametrize("error", _make_errors_of_all_classes(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "copy_error",
    [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))],  # noqa: S301 - this process wrote the bytes.
    ids=["copy", "deepcopy", "pickle"],
)
def test_error_can_be_copied_and_pickled(
    error: errors.GdrkitError, copy_error: Callable[[errors.GdrkitError], errors.GdrkitError]
) -> None:
    error.add_note("a note")
    copied_error = copy_error(error)
    assert type(copied_error) is type(error)
    assert copied_error is not error
    assert (str(copied_error), copied_error.args, copied_error.__notes__) == (str(error), error.args, error.__notes__)
    assert vars(copied_error).keys() == vars(error).keys()
    if isinstance(error, ApiError) and isinstance(copied_error, ApiError):
        assert (copied_error.api, copied_error.errno, copied_error.arguments) == (
            error.api,
            error.errno,
            error.arguments,
        )
        with pytest.raises(TypeError):
            copied_error.arguments["fd"] = 8  # type: ignore[index]
    if isinstance(error, OSError) and isinstance(copied_error, OSError):
        assert (copied_error.errno, copied_error.strerror, copied_error.filename) == (
            error.errno,
            error.strerror,
            error.filename,
        )
    if isinstance(error, errors.RegistrationFailed) and isinstance(copied_error, errors.RegistrationFailed):
        assert [str(cause) for cause in copied_error.causes] == [str(cause) for cause in error.causes]
