"""`python -m docs.site [--out FOLDER]`: build the site with Zensical (`pip install -e '.[docs]'`).

Pages are those of docs/, with the files that they link to, and those of `docs.site.generated`. A broken link, a missing
anchor, or a page that the navigation lacks is named, and ends it with exit code 1. `zensical.toml` has the navigation.
Written by default to artefacts/site, whose index.html a browser opens from any web server.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.site import generated
from docs.site.links import broken

ROOT = Path(__file__).resolve().parents[2]
DOCS, CONFIG = ROOT / "docs", Path(__file__).with_name("zensical.toml")
LINK = re.compile(r"(\]\()(\.\./[^)#\s]+)(?=[)#])")
BUILD_S = 120


def main() -> int:
    """Build the site. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "artefacts" / "site", help="the folder of the site")
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder) / "docs")
        if wrong := [*not_in_navigation(Path(folder) / "docs")]:
            print("\n".join(wrong), file=sys.stderr)
            return 1
        config = Path(folder) / CONFIG.name
        shutil.copy(CONFIG, config)
        words = ("zensical", "build", "--strict", "-f", str(config))
        done = subprocess.run(words, check=False, timeout=BUILD_S, env=os.environ | {"NO_COLOR": "1"})
        if done.returncode:
            return 1
        if wrong := [*broken(Path(folder) / "site")]:
            print("\n".join(wrong), file=sys.stderr)
            return 1
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(Path(folder) / "site", out)
    print(f"{out}: {len([*out.rglob('*.html')])} pages")
    return 0


def stage(folder: Path) -> None:
    """Write the pages of docs/, what they link to, and the generated pages to a folder."""
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("site", "__pycache__"))
    for page in folder.rglob("*.md"):
        page.write_text(_bringing(page, folder))
    for name, text in generated.pages():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def _bringing(page: Path, folder: Path) -> str:
    """The text of a page, whose links out of docs/ lead to copies."""
    return LINK.sub(lambda link: link[1] + _brought(link[2], page, folder), page.read_text())


def _brought(link: str, page: Path, folder: Path) -> str:
    """Copy a file of the repository that a page of docs/ links to. Returns the link to the copy, which is the same link
    if there is no such file, so that `broken` finds it."""
    file = (DOCS / page.relative_to(folder).parent / link).resolve()
    if not file.is_file() or not file.is_relative_to(ROOT):
        return link
    copy = folder / "files" / file.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, copy)
    return os.path.relpath(copy, page.parent)


def not_in_navigation(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the navigation: pages that it lacks, and pages that are not there."""
    named = set(_paths(tomllib.loads(CONFIG.read_text())["project"]["nav"]))
    found = {str(page.relative_to(folder)) for page in folder.rglob("*.md")}
    yield from (f"{CONFIG.name} lacks {name}" for name in sorted(found - named))
    yield from (f"{CONFIG.name} has {name}, which is no page" for name in sorted(named - found))


def _paths(nav: Any) -> Iterator[str]:
    """Yield the paths in a navigation, however deep."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _paths(part)


if __name__ == "__main__":
    sys.exit(main())
