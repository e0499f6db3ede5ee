"""Exports a run as one HTML file with all pages and data, these compressed. Opens without a network."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from pipeline.record.runs import run_directory
from pipeline.rundir import RunDir
from pipeline.web import STATIC, pages
from pipeline.web.tail import Record

LIBRARIES = ("preact-htm.js", "dagre.js")  # the modules among the files of others
STEPS = 100  # steps whose samples are included, the most recent ones
POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
GZIP = 16 + zlib.MAX_WBITS  # the format that a browser's DecompressionStream reads
OPENING = """
const bytes = Uint8Array.from(atob(document.getElementById("packed").textContent), (one) => one.charCodeAt(0));
const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
globalThis.embedded = JSON.parse(await new Response(unpacked).text());
await import("sluice/app.js");
"""
IMPORT = re.compile(r'(from|import) "\./([\w./-]+)"')


def offline(path: Path) -> Iterator[str]:
    """Yield the file in pieces. Raises GraphError if `path` is not a run directory."""
    run_directory(path)
    answers, record = _json(_answers(path)), Record.read(path)  # a damaged run fails before the first piece
    index = (STATIC / "index.html").read_text()
    head, _, _ = index.partition("<link rel=")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n    '
    icon = f'<link rel="icon" href="{_url(STATIC / "icon.svg", "image/svg+xml")}">\n'
    yield head.replace("<meta charset", f"{policy}<meta charset")
    yield icon
    for name in ("vendor/uplot.css", "style.css"):
        yield f"<style>{(STATIC / name).read_text()}</style>\n"
    yield f"<script>{(STATIC / 'vendor/uplot.js').read_text()}</script>\n"
    yield f'<script type="importmap">{_json({"imports": _modules()})}</script>\n'
    yield '</head><body><div id="app"></div>\n<script type="text/plain" id="packed">'
    yield from _packed((f'{{"run":{_json(path.name)},"answers":{answers},"events":[', *_events(record), "]}"))
    yield f'</script>\n<script type="module">{OPENING}</script></body></html>\n'


def _packed(pieces: Iterable[str]) -> Iterator[str]:
    """Compress texts, in base64."""
    packer, rest = zlib.compressobj(9, wbits=GZIP), b""
    for piece in pieces:
        rest += packer.compress(piece.encode())
        whole = len(rest) - len(rest) % 3  # base64 encodes three bytes at a time
        if whole:
            yield base64.b64encode(rest[:whole]).decode()
        rest = rest[whole:]
    yield base64.b64encode(rest + packer.flush()).decode()


UNQUOTED = "!*'()"  # by encodeURIComponent, as in api.js


def _answers(path: Path) -> dict[str, Any]:
    """Return the server's responses by request."""
    of = f"runs/{quote(path.name, safe=UNQUOTED)}"
    kept = RunDir(path).sampled_steps()[-STEPS:]
    answers = {f"{of}/{what}": pages.PAGES[what](path, {}) for what in ("about", "findings", "advice", "prompts")}
    for step in kept:
        answers[f"{of}/samples?step={step}"] = pages.samples(path, {"step": str(step)}) | {"steps": kept}
    answers[f"{of}/samples"] = answers[f"{of}/samples?step={kept[-1]}"] if kept else pages.samples(path, {})
    return answers


def _events(record: Record) -> Iterator[str]:
    offset = 0
    while block := record.block(offset):
        offset = block.offset
        yield _json(["rows", block.rows]) + ","
    yield _json(["now", record.now()])


def _modules() -> dict[str, str]:
    """Return every module as a data URL, by import name."""
    found = {}
    for file in [*STATIC.glob("*.js"), *(STATIC / "vendor" / name for name in LIBRARIES)]:
        text = IMPORT.sub(r'\1 "sluice/\2"', file.read_text())
        found[f"sluice/{file.relative_to(STATIC)}"] = _encoded(text.encode(), "text/javascript")
    return found


def _url(file: Path, content_type: str) -> str:
    return _encoded(file.read_bytes(), content_type)


def _encoded(data: bytes, content_type: str) -> str:
    return f"data:{content_type};base64,{base64.b64encode(data).decode()}"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
