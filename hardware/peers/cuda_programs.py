"""The programs with GPU memory that `nox -s peers -- cuda` runs: torch, kvikio, NIXL, UCX, and refused programs."""

from __future__ import annotations

from pathlib import Path

from hardware.peers.programs import CHECKED_BY_COUNTERS, CHECKED_BY_PROGRAM, REFUSED, StockProgram

__all__ = ["list_cuda_programs"]

_FOLDER = Path(__file__).parent
_MIB = 1 << 20
# By default, UCX asks the kernel whether it has a route to the GID of the peer. The kernel has no route to a twin, so
# the mode `all` turns this check off. UCX_PROTO_INFO makes UCX print which transport moves the bytes of an operation.
_VERBS_SETTINGS = (
    "UCX_TLS=rc_verbs,ud_verbs:aux,cuda_copy,self",
    "UCX_IB_ROCE_REACHABILITY_MODE=all",
    "UCX_PROTO_INFO=y",
)
_IPC_SETTINGS = ("UCX_TLS=cuda_ipc,cuda_copy,tcp", "UCX_PROTO_INFO=y")
_COPY_SETTINGS = ("UCX_TLS=cuda_copy,tcp,self", "UCX_PROTO_INFO=y")
_EXPANDABLE_SETTING = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
# The twin prints the line that refuses a static CUDA runtime exactly once. The expression does not match if there are
# two such lines.
_REFUSED_RUNTIME_PATTERN = (
    r"(?s)\A(?!.*as a static library.*as a static library).*contains the CUDA runtime as a static library"
)
_REFUSED_KERNEL_PATTERN = r"the launch of the kernel .*elementwise_kernel.* fails with cudaErrorNotSupported"


def list_cuda_programs(python: str) -> list[StockProgram]:
    """Return the programs with GPU memory. `python` is the interpreter of an environment that has their packages."""
    return [
        *_list_torch_programs(python),
        *_list_kvikio_programs(python),
        *_list_nixl_programs(python),
        *_list_ucx_programs(python),
        *_list_refused_programs(python),
    ]


def _make_command(python: str, case: str, *settings: str) -> tuple[str, ...]:
    return (*(("env", *settings) if settings else ()), python, str(_FOLDER / "cuda_peer.py"), case)


def _list_torch_programs(python: str) -> list[StockProgram]:
    programs = [
        StockProgram(
            f"torch, {subject}",
            "torch",
            _make_command(python, case, *settings),
            data_check=CHECKED_BY_PROGRAM,
            moved_bytes_min=moved_mib_min * _MIB,
            apis=("cuda",),
            output_pattern=f"^{case}: right",
        )
        # A case moves slightly more than 4 MiB in each copy: torch_streams makes 3 copies in each of 20 rounds.
        for subject, case, moved_mib_min, settings in (
            ("copies on two devices, both ways", "torch_copies", 32, ()),
            ("pinned memory", "torch_pinned", 8, ()),
            ("streams and events", "torch_streams", 240, ()),
            ("a storage shared by two processes", "torch_shared", 16, ()),
            ("expandable segments", "torch_expandable", 96, (_EXPANDABLE_SETTING,)),
        )
    ]
    # PYTHONPATH makes torch_rdma.py import gdrkit from this tree.
    rdma_command = ("env", f"PYTHONPATH={_FOLDER.parents[1]}", python, str(_FOLDER / "torch_rdma.py"))
    name = "torch, a file by gdrkit.gds, by RDMA to the tensor of a second process"
    apis, output_pattern = ("verbs", "cuda"), r"by RDMA \(dmabuf\): right$"
    programs.append(
        StockProgram(
            name,
            "torch",
            rdma_command,
            data_check=CHECKED_BY_PROGRAM,
            moved_bytes_min=8 * _MIB,
            apis=apis,
            output_pattern=output_pattern,
        )
    )
    return programs


def _list_kvikio_programs(python: str) -> list[StockProgram]:
    return [
        StockProgram(
            f"kvikio, compat_mode {mode}, beside the wheel nvidia-cufile",
            "kvikio-cu12",
            _make_command(python, f"kvikio_files:{mode}"),
            data_check=CHECKED_BY_PROGRAM,
            moved_bytes_min=24 * _MIB,
            # With on and auto, kvikio reads and writes the files itself, without cuFile.
            apis=("cufile", "cuda") if mode == "off" else ("cuda",),
            output_pattern="^kvikio_files: right",
        )
        for mode in ("on", "off", "auto")
    ]


def _list_nixl_programs(python: str) -> list[StockProgram]:
    programs = [
        StockProgram(
            f"NIXL, backend {backend}, {memory} memory",
            "nixl",
            _make_command(python, f"nixl_files:{backend}"),
            data_check=CHECKED_BY_PROGRAM,
            moved_bytes_min=8 * _MIB,
            apis=apis,
            output_pattern="^nixl_files: right",
        )
        for backend, memory, apis in (
            ("GDS", "GPU", ("cufile", "cuda")),
            ("GDS_MT", "GPU", ("cufile", "cuda")),
            ("POSIX", "host", ("cuda",)),
        )
    ]
    for transport, settings, apis, moved_mib_min in (
        ("rc_verbs", _VERBS_SETTINGS, ("verbs", "cuda"), 2),
        # The two transfers move 2 MiB. The processes also fill and read their GPU memory five times, 1 MiB each time.
        ("cuda_ipc", _IPC_SETTINGS, ("cuda",), 7),
    ):
        client, server = (
            ("env", *settings, python, str(_FOLDER / "python_peer.py"), "nixl-gpu", role, "{folder}")
            for role in ("initiator", "target")
        )
        programs.append(
            StockProgram(
                f"NIXL, GPU memory over {transport}, two processes",
                "nixl",
                client,
                server,
                data_check=CHECKED_BY_PROGRAM,
                moved_bytes_min=moved_mib_min * _MIB,
                apis=apis,
                output_pattern=rf"zero-copy +\| {transport}/",
            )
        )
    return programs


def _list_ucx_programs(python: str) -> list[StockProgram]:
    """Return the runs of the ucx_perftest that is in the wheel of UCX.

    This ucx_perftest finds its libraries only by LD_LIBRARY_PATH, so the commands set the variable.
    """
    ucx_folder = next(Path(python).parents[1].glob("lib/python*/site-packages/libucx"), Path("libucx"))
    programs = []
    for transport, settings, output_pattern in (
        ("cuda_copy", _COPY_SETTINGS, r"cuda_copy/cuda"),
        ("cuda_ipc", _IPC_SETTINGS, r"zero-copy +\| cuda_ipc/cuda"),
    ):
        server_command = (
            "env",
            f"LD_LIBRARY_PATH={ucx_folder}/lib",
            *settings,
            str(ucx_folder / "bin" / "ucx_perftest"),
            "-p",
            "{port}",
        )
        test_options = ("-t", "ucp_put_bw", "-m", "cuda", "-s", str(_MIB), "-n", "20", "-w", "2", "127.0.0.1")
        programs.append(
            StockProgram(
                f"ucx_perftest -t ucp_put_bw -m cuda, {transport}",
                "libucx-cu12",
                (*server_command, *test_options),
                server_command,
                data_check=CHECKED_BY_COUNTERS,
                moved_bytes_min=20 * _MIB,
                apis=("cuda",),
                output_pattern=output_pattern,
            )
        )
    return programs


def _list_refused_programs(python: str) -> list[StockProgram]:
    """Return the programs that a twin refuses. Each program prints one line with the reason, and ends."""
    return [
        StockProgram(
            name,
            package,
            _make_command(python, case),
            data_check=REFUSED,
            apis=("cuda",),
            output_pattern=output_pattern,
        )
        for name, package, case, output_pattern in (
            ("torch, a kernel: refused", "torch", "torch_kernel", _REFUSED_KERNEL_PATTERN),
            ("cupy, static CUDA runtime: refused", "cupy-cuda12x", "cupy_refusal", _REFUSED_RUNTIME_PATTERN),
            (
                "cuda.bindings.runtime, static CUDA runtime: refused",
                "cuda-bindings",
                "bindings_refusal",
                _REFUSED_RUNTIME_PATTERN,
            ),
        )
    ]
