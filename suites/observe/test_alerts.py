"""Prometheus evaluates the alert rules of gdrkit: they fire for a leak, and only for a leak."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from observe.metrics_client import REGION_HOLDER_COMMAND, read_metrics_url, start_gdrkit
from support.processes import LineChildProcess

from gdrkit import monitor
from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, host, needs, software, verbs
from gdrkit.registration import RegionCache

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

RULES_PATH = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "gdrkit.rules.yml"
# The healthy process keeps HELD_COUNT memory regions and dma-bufs, and registers and deregisters CYCLE_COUNT regions.
CYCLE_COUNT = 10_000
HELD_COUNT = 100


@needs(host.program("prometheus"), cuda.device(), verbs.nic())
@pytest.mark.timeout(240)
def test_prometheus_warns_of_a_leak_alone(tmp_path: Path, device: Device, nic: Nic) -> None:
    """One cache leaks, and one cache registers and evicts. The rules have windows of seconds instead of minutes."""
    write_short_rules(tmp_path)
    with contextlib.ExitStack() as stack:
        # With the default limit of 1024 regions, the cache could be full, and so stop growing, before the alert fires.
        leaking_cache = stack.enter_context(RegionCache([nic], regions_max=100_000))
        steady_cache = stack.enter_context(RegionCache([nic], regions_max=1))
        for name, cache in (("leaking", leaking_cache), ("steady", steady_cache)):
            stack.enter_context(monitor.watch("cache", cache.statistics, name=name))
        metrics_server = stack.enter_context(monitor.serve_metrics("127.0.0.1", 0))
        stop_event = threading.Event()
        leasing_thread = threading.Thread(
            target=lease_until_stopped, args=(device, leaking_cache, steady_cache, stop_event)
        )
        leasing_thread.start()
        try:
            assert wait_for_alerts(tmp_path, metrics_server.address, {"GdrkitCacheGrows"}, "name") == {"leaking"}
        finally:
            stop_event.set()
            leasing_thread.join()


def lease_until_stopped(
    device: Device, leaking_cache: RegionCache, steady_cache: RegionCache, stop_event: threading.Event
) -> None:
    """Register at most 100 allocations per second in both caches until `stop_event` is set. Then free the memory."""
    with contextlib.ExitStack() as stack:
        while not stop_event.wait(0.01):
            memory = stack.enter_context(device.allocate(4096))
            leaking_cache.lease(memory).close()
            steady_cache.lease(memory).close()


@needs(host.program("prometheus"), software(Api.VERBS), software(Api.CUDA))
@pytest.mark.timeout(240)
def test_prometheus_warns_of_the_process_that_leaks(tmp_path: Path) -> None:
    write_short_rules(tmp_path)
    with (
        start_gdrkit("monitor", "--listen", "127.0.0.1:0", "--interval", "0.1") as monitor_process,
        LineChildProcess(*REGION_HOLDER_COMMAND) as healthy_child,
        LineChildProcess(*REGION_HOLDER_COMMAND) as leaking_child,
    ):
        healthy_child.read_line()
        leaking_process_id = leaking_child.read_line()
        for line in (f"hold {HELD_COUNT}", f"cycle {CYCLE_COUNT}"):
            healthy_child.write_line(line)
            healthy_child.expect_line("done")
        leaking_child.write_line("leak")
        alert_names = {"GdrkitRegionsGrow", "GdrkitDmabufsGrow"}
        assert wait_for_alerts(tmp_path, read_metrics_url(monitor_process.stdout), alert_names, "pid") == {
            leaking_process_id
        }


def write_short_rules(folder: Path) -> None:
    """Write the rules with windows of seconds instead of minutes."""
    rules = (
        RULES_PATH.read_text()
        .replace("[5m] offset 25m", "[4s] offset 12s")
        .replace("[5m] offset 10m", "[4s] offset 6s")
    )
    (folder / "rules.yml").write_text(rules.replace("[5m]", "[4s]"))


def wait_for_alerts(folder: Path, metrics_url: str, alert_names: set[str], label: str) -> set[str]:
    """Run Prometheus until each of `alert_names` has fired. Return the values of `label` in the alerts that fired."""
    (folder / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                "rule_files": ["rules.yml"],
                "scrape_configs": [
                    {"job_name": "gdrkit", "static_configs": [{"targets": [metrics_url.split("/")[2]]}]},
                ],
            }
        )
    )
    port = find_free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (
        (folder / "prometheus.log").open("w") as log,
        subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log) as prometheus,
    ):
        try:
            deadline_s = time.monotonic() + 150
            fired_alerts = set[tuple[str, str]]()
            while time.monotonic() < deadline_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    prometheus.wait(0.5)
                fired_alerts |= query_fired_alerts(f"http://127.0.0.1:{port}/api/v1/alerts", alert_names, label)
                if {name for name, _ in fired_alerts} == alert_names:
                    return {label_value for _, label_value in fired_alerts}
        finally:
            prometheus.terminate()
            prometheus.wait(30)
    pytest.fail((folder / "prometheus.log").read_text()[-2000:])


def query_fired_alerts(url: str, alert_names: set[str], label: str) -> set[tuple[str, str]]:
    """Return the pair (name, value of `label`) of each alert in `alert_names` that fires now."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310 - an address of this test.
            alerts = json.load(reply)["data"]["alerts"]
    except OSError:
        return set()  # Prometheus has not started yet.
    return {
        (alert["labels"]["alertname"], alert["labels"][label])
        for alert in alerts
        if alert["labels"]["alertname"] in alert_names and alert["state"] == "firing"
    }


def find_free_port() -> int:
    """Return a TCP port that the kernel chose for a server, which is closed now."""
    with monitor.serve_metrics("127.0.0.1", 0, metrics=tuple) as server:  # tuple() returns no metrics.
        return int(server.address.split(":")[2].partition("/")[0])
