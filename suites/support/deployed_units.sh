#!/usr/bin/env bash
# Starts the units of deploy/systemd in an image of deploy/Containerfile, and writes and reads a file as a client of the agent.
#
# fresh_machine.sh runs this as a service of a booted systemd, by `gdrkit run --software`. The units get the same software twins.
set -euo pipefail

mkdir -p /data /hf3fs /etc/gdrkit
echo 'GDRKIT_SERVE_OPTIONS=--store /data --listen 127.0.0.1:7001' >/etc/gdrkit/serve.conf
echo 'GDRKIT_AGENT_OPTIONS=--server 127.0.0.1:7001 --token-file /data/.gdrkit/token' >/etc/gdrkit/agent.conf
for unit in gdrkit-serve gdrkit-agent@; do
    mkdir -p "/run/systemd/system/$unit.service.d"
    { echo '[Service]' && env | sed -nE 's/^((GDRKIT|LD)_.*)$/Environment="\1"/p'; } >"/run/systemd/system/$unit.service.d/twins.conf"
done
systemctl daemon-reload
units=(gdrkit-serve.service gdrkit-agent@hf3fs.service)
# The agent ends with an error while the server has no token yet. The unit then starts it again.
systemctl start "${units[@]}"
/opt/gdrkit/bin/python3 - <<'PYTHON'
import os
import time
from pathlib import Path

from gdrkit import usrbio

mount = Path("/hf3fs")
for _ in range(600):
    if (mount / "3fs-virt").is_dir():
        break
    time.sleep(0.1)
(mount / "file").write_bytes(b"0123456789abcdef" * 65536)
data = usrbio.read_file(mount / "file", str(mount), block_size=65536)
assert data is not None and bytes(data) == b"0123456789abcdef" * 65536
print("read 1 MiB by the agent")
PYTHON
systemctl is-active "${units[@]}"
systemctl stop "${units[@]}"
for unit in "${units[@]}"; do
    systemctl show --property Id --property Result --property ExecMainStatus "$unit"
    [ "$(systemctl show --value --property Result "$unit")" = success ]
done
