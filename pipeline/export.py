"""`python -m pipeline.export RUN --html FILE --perfetto FILE --csv FOLDER --samples FILE --model FOLDER`: export a run.

--html writes one file with the pages of the view, which a browser opens offline. --perfetto writes Chrome's trace
format, which ui.perfetto.dev and chrome://tracing open: one track per worker (more if its streams overlap), the
critical path, the driver, and counters of groups present, version and staleness. --csv writes spans.csv, metrics.csv,
path.csv and gaps.csv. --samples writes the kept samples as a TensorDict, for torch.load. --model writes the trained
model as a Hugging Face folder, from the newest complete checkpoint or that of --step; an adapter as a folder of PEFT,
or, with --merge, added to the model in the folder BASE. RUN may be live, finished, failed or killed. All starts of a
resumed run are exported; the critical path and the gaps are those of the last. An export never overwrites anything: a
file that is there is refused before any is written; a device, such as /dev/stdout, is written to. Exit codes: 0 done;
2 RUN, a flag or a file is wrong; 6 a checkpoint is damaged.

    python -m pipeline.export runs/quickstart-... --html run.html
    python -m pipeline.export runs/quickstart-... --perfetto trace.json --csv tables
    python -m pipeline.export runs/quickstart-... --model model --step 100
    python -m pipeline.export runs/grpo-... --model model --merge Qwen3-0.6B

Functions do the same; those that yield text read the record incrementally:

    for piece in perfetto(Path("runs/quickstart-...")): response.write(piece.encode())
    for name, table in tables(run).items(): (folder / name).write_text("".join(table))
    kept_samples(run)["response_ids"]                             # nested tensors, one per sample
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from pipeline.analysis.perfetto import perfetto
from pipeline.analysis.tables import TABLES, metrics_csv, spans_csv, tables
from pipeline.cli.command import Parser, exit_code, natural
from pipeline.cli.listing import example
from pipeline.cli.model_folder import export_model
from pipeline.data_plane.kept import kept_samples
from pipeline.errors import GraphError, Problem
from pipeline.precedence import typed
from pipeline.record.runs import consistent, open_run
from pipeline.web.offline import offline
from pipeline.writing import whole

__all__ = ["kept_samples", "main", "metrics_csv", "perfetto", "spans_csv", "tables"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    for flag, value, why in (
        ("--step", options.step, "it selects the checkpoint of the exported model"),
        ("--merge", options.merge, "it names the model to which the exported adapter is added"),
    ):
        if value is not None and not options.model:
            raise GraphError(
                Problem(where=flag, what="no --model is given", why=why, fix=f"--model FOLDER {flag} {value}")
            )
    formats = (options.html, options.perfetto, options.csv, options.samples, options.model)
    if options.run is None or not any(formats):
        raise GraphError(
            Problem(
                where="command line",
                what="no run is named" if options.run is None else "no format is named",
                why="a run is exported as a page, as a Perfetto trace, as tables, as its samples, or as its model",
                fix=" ".join([*typed("pipeline.export"), example(options.run), "--html run.html"]),
            )
        )
    run = Path(options.run)
    if problems := tuple(_taken(options)):
        raise GraphError(*problems)
    with consistent(run):
        if options.html:
            _write(Path(options.html), map(str.encode, offline(run)), f"--html {options.html}")
        if options.perfetto:
            _write(Path(options.perfetto), map(str.encode, perfetto(run)), f"--perfetto {options.perfetto}")
        if options.csv:
            for name, table in tables(run).items():
                _write(Path(options.csv) / name, map(str.encode, table), f"--csv {options.csv}")
    if options.samples:
        _write(Path(options.samples), _saved(run), f"--samples {options.samples}")
    if options.model:
        export_model(run, options.step, Path(options.model), Path(options.merge) if options.merge else None)
    return 0


def _taken(options: argparse.Namespace) -> Iterator[Problem]:
    """Yield a problem for every file that the export would overwrite: one that is there, or that another flag names."""
    files = [(f"--{name}", Path(file)) for name in ("html", "perfetto", "samples") if (file := getattr(options, name))]
    files += [("--csv", Path(options.csv) / name) for name in TABLES] if options.csv else []
    named: dict[Path, str] = {}
    for flag, file in files:
        other = named.setdefault(file.resolve(), flag)
        if file.is_file() or (other != flag and not file.exists()):
            yield Problem(
                where=f"{flag} {file.parent if flag == '--csv' else file}",
                what=f"{file} already exists" if file.is_file() else f"{other} writes that file",
                why="an export never overwrites anything",
                fix="use another path",
            )


def _saved(run: Path) -> Iterator[bytes]:
    open_run(run)  # raises if there is no such run
    kept = kept_samples(run)
    import torch

    file = io.BytesIO()
    torch.save(kept, file)
    yield file.getvalue()


def _write(path: Path, pieces: Iterator[bytes], flag: str) -> None:
    """Write a file whole, or none."""
    first = next(pieces)  # raises if there is no such run, before anything is written
    is_device = path.exists() and not path.is_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext(path) if is_device else whole(path) as partial, partial.open("wb") as file:
            file.write(first)
            file.writelines(pieces)
    except OSError as error:
        raise GraphError(
            Problem(
                where=flag,
                what=f"{path} cannot be written: {error.strerror}",
                why="the export is a new file",
                fix="use another path",
            )
        ) from error
    print(f"{path}: {path.stat().st_size:,} bytes")


def _parser() -> Parser:
    parser = Parser(prog=" ".join(typed("pipeline.export")), usage="%(prog)s RUN [flags]")
    parser.graph_file = "RUN"
    parser.epilog = "exit codes: 0 done; 2 RUN, a flag or a file is wrong; 6 a checkpoint is damaged"
    parser.add_argument("run", nargs="?", help="a run directory")
    parser.add_argument("--html", metavar="FILE", help="write the pages of the view as one file that opens offline")
    parser.add_argument("--perfetto", metavar="FILE", help="write a trace that ui.perfetto.dev opens")
    parser.add_argument("--csv", metavar="FOLDER", help="write spans.csv, metrics.csv, path.csv and gaps.csv there")
    parser.add_argument("--samples", metavar="FILE", help="write the kept samples as a TensorDict, for torch.load")
    parser.add_argument("--model", metavar="FOLDER", help="write the model of a checkpoint as a Hugging Face folder")
    parser.add_argument("--merge", metavar="BASE", help="with --model: add the adapter to the model in this folder")
    parser.add_argument("--step", type=natural, metavar="N", help="export the model after N steps; default: the newest")
    return parser


if __name__ == "__main__":
    sys.exit(main())
