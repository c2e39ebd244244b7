"""Program that exports a dma-buf from a kernel driver, prints `ready`, and holds the dma-buf until stdin is closed.

`python -m observe.dmabuf_holder DEVICE LENGTH_BYTES`: DEVICE is a device file of :mod:`support.kernel_exporters`.
"""

from __future__ import annotations

import sys

from support.kernel_exporters import export_dmabuf

if __name__ == "__main__":
    with export_dmabuf(sys.argv[1], int(sys.argv[2])):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()
