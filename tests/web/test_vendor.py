"""Third-party files match `vendor.json`, have their licenses, and are small."""

import hashlib
import json
from pathlib import Path

STATIC = Path(__file__).parents[2] / "pipeline" / "web" / "static"
VENDOR = STATIC / "vendor"


def test_files_are_the_ones_that_are_listed():
    listed = json.loads((VENDOR / "vendor.json").read_text())
    for entry in listed:
        assert hashlib.sha256((VENDOR / entry["file"]).read_bytes()).hexdigest() == entry["sha256"], entry["file"]
    there = {path.name for path in VENDOR.iterdir()} - {"vendor.json"}
    licences = {name for name in there if name.startswith("LICENSE-")}
    assert there - licences == {entry["file"] for entry in listed}
    assert licences == {"LICENSE-dagre", "LICENSE-htm", "LICENSE-preact", "LICENSE-uplot"}


def test_they_are_small():
    assert sum(path.stat().st_size for path in VENDOR.glob("*.[jc]s*")) < 120_000


def test_pages_name_no_other_host_and_write_no_markup():
    for path in [*STATIC.glob("*.js"), *STATIC.glob("*.html"), *STATIC.glob("*.css")]:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text, path
        assert "innerHTML" not in text and "dangerouslySetInnerHTML" not in text and "eval(" not in text, path
