"""How much work of a GPU's streams overlaps, from a trace of torch's profiler (Chrome's format)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.record.history import covered_s


def traced(run: Callable[[], Any], path: Path) -> None:
    """Write a trace of one run, until its work on the GPU has ended."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    trace.export_chrome_trace(str(path))


def hidden_percent(path: Path) -> float:
    """The percentage of the time of all kernels other than NCCL's that overlaps a kernel of another stream."""
    spans = [
        (event["args"]["stream"], event["name"].startswith("nccl"), event["ts"], event["ts"] + event["dur"])
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    total_us = hidden_us = 0.0
    for stream, is_nccl, begin_us, end_us in spans:
        if not is_nccl:
            total_us += end_us - begin_us
            hidden_us += covered_s(
                (max(begin_us, first_us), min(end_us, last_us))
                for other, _, first_us, last_us in spans
                if other != stream and last_us > begin_us and first_us < end_us
            )
    return 100 * hidden_us / total_us if total_us else 0.0
