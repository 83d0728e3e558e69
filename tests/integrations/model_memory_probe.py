"""Measures a whole model's load in a process of its own; run by ``test_model_memory.py``.

Counts by itself, from ``/proc/self/status``. Arguments: folder of the checkpoint, dtype, staging
bytes. A first load warms up what Python and Transformers keep for themselves.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from pathlib import Path

import torch

from loader import memory
from loader.integrations.transformers import from_pretrained

torch.set_num_threads(1)


def anonymous() -> int:
    kib = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            kib += int(line.split()[1])
    return kib << 10


def main(folder: str, dtype: str, staging: int) -> None:
    from_pretrained(folder, dtype=dtype, staging_bytes=staging)
    gc.collect()
    memory.return_to_system()
    before, highest, stop = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            highest[0] = max(highest[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    time.sleep(0.01)
    model, report = from_pretrained(
        folder, dtype=dtype, staging_bytes=staging, output_loading_info=True
    )
    stop.set()
    thread.join()
    gc.collect()
    memory.return_to_system()
    tensors = [*model.parameters(), *model.buffers()]
    found = {
        "before": before,
        "peak": highest[0],
        "after": anonymous(),
        "tensors": memory.storage_bytes(tensors),
        "report": report.to_dict()["memory"],
        "payload": report.read_bytes,
    }
    del model, tensors
    gc.collect()
    memory.return_to_system()
    print(json.dumps({**found, "dropped": anonymous()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
