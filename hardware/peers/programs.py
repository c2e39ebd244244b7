"""The programs of Debian packages that `nox -s peers` runs, with the arguments that their users give them.

Words in braces are replaced before a program starts: ``{device}`` by the name of an RDMA device, ``{gid}`` by the index
of its RoCE GID, ``{address}`` by an IP address that reaches the device, ``{port}`` by a free TCP port, ``{folder}`` by
an empty folder.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = [
    "CHECKED_BY_COUNTERS",
    "CHECKED_BY_PROGRAM",
    "NOTHING_MOVED",
    "REFUSED",
    "StockProgram",
    "list_debian_programs",
]

# The program compares the received bytes with the sent ones.
CHECKED_BY_PROGRAM = "by the program"
# The program does not check the received bytes. The counters of the software twin (the library that emulates the
# hardware) show only how many bytes moved.
CHECKED_BY_COUNTERS = "number of bytes"
# The program moves no bytes.
NOTHING_MOVED = "no data"
# The twin refuses a call of the program, as it should.
REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class StockProgram:
    """One run of a program, or of a server and its client.

    Attributes
    ----------
    name : str
        The command line as a user would write it, without the options that only this run needs.
    package : str
        The Debian package, or the distribution on PyPI.
    client : tuple of str
        The command of the client, or of a program that runs alone.
    server : tuple of str
        The command of the server, which is started first. Empty if the program runs alone.
    data_check : str
        How the received data is checked: CHECKED_BY_PROGRAM or CHECKED_BY_COUNTERS. If there is no data to check:
        NOTHING_MOVED or REFUSED.
    moved_bytes_min : int
        The twins of both processes together must have moved at least this number of bytes.
    apis : tuple of str
        The APIs that the program uses. The twin of the first API must have moved the bytes.
    output_pattern : str
        A regular expression that must match in the output of the client.
    sent_file_bytes : int
        Length of the file ``{folder}/source``, which is written before the start. The program must copy it to
        ``{folder}/copy``. 0: there is no file.
    timeout_s : float
        Time limit in seconds, if this program needs more time than the common limit; else 0.
    expected_unused_api : str
        An API that the program does not use. On twins, `gdrkit run --require` with this API must then end with 125,
        its exit code for a required API that was not used. Empty: the programs must end with 0.
    """

    name: str
    package: str
    client: tuple[str, ...]
    server: tuple[str, ...] = ()
    data_check: str = CHECKED_BY_COUNTERS
    moved_bytes_min: int = 0
    apis: tuple[str, ...] = ("verbs",)
    output_pattern: str = ""
    sent_file_bytes: int = 0
    timeout_s: float = 0.0
    expected_unused_api: str = ""


def list_debian_programs() -> list[StockProgram]:
    """Return all runs of programs of Debian packages."""
    return [
        *_list_ibverbs_programs(),
        *_list_perftest_programs(),
        *_list_rdmacm_programs(),
        *_list_libfabric_programs(),
        *_list_ucx_programs(),
    ]


def _list_ibverbs_programs() -> list[StockProgram]:
    package = "ibverbs-utils"
    programs = [
        StockProgram("ibv_devices", package, ("ibv_devices",), data_check=NOTHING_MOVED, output_pattern="{device}"),
        StockProgram(
            "ibv_devinfo -v", package, ("ibv_devinfo", "-v"), data_check=NOTHING_MOVED, output_pattern="PORT_ACTIVE"
        ),
    ]
    option_texts_by_program: dict[str, tuple[str, ...]] = {
        "ibv_rc_pingpong": ("", "-e", "-s 65536 -m 4096", "-r 16 -l 1", "-N", "-t"),
        "ibv_uc_pingpong": ("", "-e", "-s 65536"),
        "ibv_ud_pingpong": ("", "-e", "-s 1024"),
        "ibv_srq_pingpong": ("", "-e", "-q 4"),
    }
    for program, option_texts in option_texts_by_program.items():
        for option_text in option_texts:
            # ibv_ud_pingpong shortens its default of 2,048 bytes to the path MTU, so 1,024 is a lower limit.
            length_bytes = 65536 if "65536" in option_text else 1024 if "ud" in program else 4096
            command = (
                program,
                "-d",
                "{device}",
                "-g",
                "{gid}",
                "-c",
                "-n",
                "100",
                "-p",
                "{port}",
                *option_text.split(),
            )
            programs.append(
                StockProgram(
                    " ".join(filter(None, (program, "-g 1 -c", option_text))),
                    package,
                    (*command, "{address}"),
                    command,
                    data_check=CHECKED_BY_PROGRAM,
                    # Each side sends 100 messages (-n).
                    moved_bytes_min=2 * 100 * length_bytes,
                    output_pattern=r"bytes in .* seconds",
                )
            )
    # ibv_xsrq_pingpong has no option that checks the data. By default, each side sends 5 messages of 4,096 bytes.
    for option_text in ("", "-e"):
        command = ("ibv_xsrq_pingpong", "-d", "{device}", "-g", "{gid}", "-p", "{port}", *option_text.split())
        name = " ".join(filter(None, ("ibv_xsrq_pingpong -g 1", option_text)))
        programs.append(StockProgram(name, package, (*command, "{address}"), command, moved_bytes_min=2 * 5 * 4096))
    return programs


def _list_perftest_programs() -> list[StockProgram]:
    """Return every test of perftest, once with each type of connection, and once with each of some other options."""
    # The types of connection that each test supports.
    connection_types_by_test = {"write": ("RC", "UC", "XRC"), "read": ("RC", "XRC"), "send": ("RC", "UC", "UD", "XRC")}
    connection_types_by_test["atomic"] = ("RC", "XRC")
    programs = []
    for test, connection_types in connection_types_by_test.items():
        for quantity in ("bw", "lat"):
            program = f"ib_{test}_{quantity}"
            option_texts = [f"-c {connection_type}" for connection_type in connection_types]
            option_texts += ["--use_old_post_send", "-R"]
            if test == "send":
                option_texts += ["--use-srq", "-c UD -R"]
            if quantity == "bw":
                # ib_send_lat is not run with -e. After an event, it expects the completion of its send, and fails if
                # the event is for a receive.
                option_texts += ["-e"] if test == "send" else []
                option_texts += ["-q 8 -b", "-l 16"]
                option_texts += [] if test == "atomic" else ["-a -n 20"]
            elif test in {"write", "send"}:
                option_texts.append("-I 64 -s 8")
            programs += [_make_perftest_program(program, option_text) for option_text in option_texts]
    programs.append(_make_perftest_program("ib_send_bw", "-c UD -g"))
    return programs


def _make_perftest_program(program: str, option_text: str) -> StockProgram:
    # perftest requests one completion for 100 requests, or for 16 with -l 16. The number of iterations must be a
    # multiple of 100 or of 16. Otherwise perftest 4.5 waits for ever if its queue pairs (-q) are not equally fast.
    operation_count = 20 if "-n 20" in option_text else 512 if "-l 16" in option_text else 500
    length_bytes = 8 if "atomic" in program or "-s 8" in option_text else 1024
    options = option_text.split()
    if "-n" not in options:
        options += ["-n", str(operation_count)]
    if "atomic" not in program and "-s" not in options and "-a" not in options:
        options += ["-s", str(length_bytes)]
    command = (program, "-F", "-d", "{device}", "-x", "{gid}", "-p", "{port}", *options)
    return StockProgram(
        f"{program} {option_text}",
        "perftest",
        (*command, "{address}"),
        command,
        moved_bytes_min=operation_count * length_bytes,
        output_pattern=r"^\s*\d+\s+\d+\s+[\d.]+",
    )


def _list_rdmacm_programs() -> list[StockProgram]:
    package = "rdmacm-utils"
    server_option = ("-s", "{address}")  # The option by which a client names the address of its server.

    def make_pair(
        name: str,
        client: tuple[str, ...],
        server: tuple[str, ...],
        data_check: str = CHECKED_BY_COUNTERS,
        moved_bytes_min: int = 1,
    ) -> StockProgram:
        return StockProgram(name, package, client, server, data_check=data_check, moved_bytes_min=moved_bytes_min)

    rping_command = ("rping", "-a", "{address}", "-p", "{port}", "-C", "100", "-V", "-v", "-S", "1000")
    programs = [
        make_pair("rping -C 100 -V -v", (*rping_command, "-c"), (*rping_command, "-s"), CHECKED_BY_PROGRAM, 100 * 1000),
        make_pair(
            "ucmatose",
            ("ucmatose", *server_option, "-C", "20"),
            ("ucmatose", "-b", "{address}", "-C", "20"),
            CHECKED_BY_COUNTERS,
            4000,
        ),
        make_pair(
            "udaddy",
            ("udaddy", *server_option, "-C", "20"),
            ("udaddy", "-b", "{address}", "-C", "20"),
            CHECKED_BY_COUNTERS,
            2000,
        ),
        make_pair(
            "mckey -m 239.1.2.3",
            ("mckey", "-m", "239.1.2.3", "-s", "-b", "{address}", "-C", "20"),
            ("mckey", "-m", "239.1.2.3", "-b", "{address}", "-C", "20"),
        ),
        make_pair("rdma_client", ("rdma_client", *server_option, "-p", "{port}"), ("rdma_server", "-p", "{port}")),
        make_pair("rdma_xclient", ("rdma_xclient", *server_option, "-p", "{port}"), ("rdma_xserver", "-p", "{port}")),
        make_pair(
            "rdma_xclient -c x",
            ("rdma_xclient", *server_option, "-p", "{port}", "-c", "x"),
            ("rdma_xserver", "-p", "{port}", "-c", "x"),
        ),
        StockProgram(
            "cmtime -c 20",
            package,
            ("cmtime", *server_option, "-c", "20", "-p", "{port}"),
            ("cmtime", "-c", "20", "-p", "{port}"),
            data_check=NOTHING_MOVED,
            output_pattern=r"^disconnect\b",
        ),
        StockProgram(
            "rcopy",
            package,
            ("rcopy", "{folder}/source", "{address}:{folder}/copy", "-p", "{port}"),
            ("rcopy", "-p", "{port}"),
            data_check=CHECKED_BY_PROGRAM,
            moved_bytes_min=1 << 20,
            sent_file_bytes=1 << 20,
        ),
    ]
    # The option -T makes the calls blocking (b), nonblocking (n) or asynchronous (a), or verifies the data (v).
    for program in ("rstream", "riostream"):
        for mode in ("b", "n", "a"):
            command = (program, "-p", "{port}", "-S", "65536", "-C", "50", "-T", mode, "-T", "v")
            name = f"{program} -T {mode} -T v"
            programs.append(make_pair(name, (*command, *server_option), command, CHECKED_BY_PROGRAM, 2 * 50 * 65536))
    # Without -S and -C, rstream measures the latency by 222,200 transfers, each after the previous one ended. On two
    # processors that other programs use too, each transfer takes up to a millisecond.
    all_sizes_program = make_pair("rstream", ("rstream", "-p", "{port}", *server_option), ("rstream", "-p", "{port}"))
    programs.append(dataclasses.replace(all_sizes_program, timeout_s=300.0))
    # Without -b, the server binds the first address that the resolver gives, which may be ::1.
    udpong_command = ("udpong", "-p", "{port}", "-C", "50")
    programs.append(make_pair("udpong", (*udpong_command, *server_option), (*udpong_command, "-b", "{address}")))
    return programs


def _list_libfabric_programs() -> list[StockProgram]:
    package = "libfabric-bin"
    programs = [
        StockProgram(
            "fi_info -p verbs",
            package,
            ("fi_info", "-p", "verbs"),
            data_check=NOTHING_MOVED,
            output_pattern="provider: verbs",
        )
    ]
    for provider, endpoint in (("verbs", "msg"), ("verbs;ofi_rxm", "rdm")):
        command = ("fi_pingpong", "-p", provider, "-e", endpoint, "-c", "-I", "20")
        name = f"fi_pingpong -p '{provider}' -e {endpoint} -c"
        client = (*command, "-P", "{port}", "{address}")
        server = (*command, "-B", "{port}")
        # Each side sends 20 messages (-I) of each length. The largest length is 1 MiB.
        programs.append(
            StockProgram(
                name, package, client, server, data_check=CHECKED_BY_PROGRAM, moved_bytes_min=2 * 20 * (1 << 20)
            )
        )
    return programs


def _list_ucx_programs() -> list[StockProgram]:
    package = "ucx-utils"
    programs = [
        StockProgram("ucx_info -d", package, ("ucx_info", "-d"), data_check=NOTHING_MOVED, output_pattern="rc_verbs")
    ]
    operation_count = 2000
    for transport, tests in {
        "rc_verbs": ("put_lat", "put_bw", "get", "am_lat", "am_bw", "fadd"),
        "ud_verbs": ("am_lat", "am_bw"),
    }.items():
        for test in tests:
            # In UCX 1.13, a zero-copy get (-D zcopy) moves at least 65 bytes.
            size_options = ("-s", "128", "-D", "zcopy") if test == "get" else ("-s", "8")
            options = ("-n", str(operation_count), "-w", "100", *size_options)
            command = ("ucx_perftest", "-p", "{port}", "-d", "{device}:1", "-x", transport, "-t", test, *options)
            programs.append(
                StockProgram(
                    f"ucx_perftest -x {transport} -t {test}",
                    package,
                    (*command, "{address}"),
                    ("ucx_perftest", "-p", "{port}"),
                    moved_bytes_min=operation_count * 8,
                )
            )
    # UCX sets up the connections of rc_verbs by datagrams, for which it needs ud_verbs as auxiliary transport (aux).
    for transport in ("rc_verbs,ud_verbs:aux", "ud_verbs"):
        for test in ("tag_lat", "tag_bw", "ucp_put_bw", "ucp_get", "ucp_am_bw", "stream_bw"):
            settings = ("env", f"UCX_TLS={transport},self", "UCX_NET_DEVICES={device}:1")
            command = (*settings, "ucx_perftest", "-p", "{port}", "-t", test, "-n", str(operation_count), "-w", "100")
            programs.append(
                StockProgram(
                    f"UCX_TLS={transport} ucx_perftest -t {test} -s 4096",
                    package,
                    (*command, "-s", "4096", "{address}"),
                    (*settings, "ucx_perftest", "-p", "{port}"),
                    moved_bytes_min=operation_count * 4096,
                )
            )
    # If a program falls back to TCP, it succeeds, but no bytes move over the twin. `gdrkit run --require verbs` must
    # report this.
    command = ("env", "UCX_TLS=tcp,self", "ucx_perftest", "-p", "{port}")
    name = "UCX_TLS=tcp ucx_perftest -t tag_lat with --require verbs ends with 125"
    client = (*command, "-t", "tag_lat", "-n", str(operation_count), "-w", "100", "-s", "4096", "{address}")
    programs.append(StockProgram(name, package, client, command, data_check=NOTHING_MOVED, expected_unused_api="verbs"))
    return programs
