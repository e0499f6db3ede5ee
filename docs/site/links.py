"""Finds the broken links of a built site: the build itself checks only those from page to page.

    for line in broken(Path("artefacts/site")): print(line)

A link is every `href` and `src` of a page. One without a scheme or host leads to a file of the site, or to a folder
with an index.html, and its fragment is an `id` there, or the `name` of an `a`. One that begins with / starts at the
folder of the site: 404.html has such links, because a server shows it at any address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOP = ("", "top")  # fragments that every page has


class _Links(HTMLParser):
    """The links of a page, and the names that links can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = {*TOP}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        self.names |= {value for name, value in attrs if value and (name == "id" or (tag, name) == ("a", "name"))}


def broken(site: Path) -> Iterator[str]:
    """Yield a line for each broken link: its page, the link, and what is missing."""

    @cache
    def page(file: Path) -> _Links:
        return _Links(file.read_text())

    root = site.resolve()
    for file in sorted(root.rglob("*.html")):
        for link in dict.fromkeys(page(file).links):
            if missing := _missing(link, file, root, page):
                yield f"{file.relative_to(root)}: {link or 'an empty link'}: {missing}"


def _missing(link: str, file: Path, root: Path, page: Callable[[Path], _Links]) -> str:
    """Return what a link lacks; empty if nothing."""
    try:
        parts = urlsplit(link)
    except ValueError as error:
        return str(error)
    if parts.scheme or parts.netloc:
        return ""
    if not link:
        return "it leads nowhere"
    path = unquote(parts.path)
    to = file if not path else root / path.lstrip("/") if path.startswith("/") else file.parent / path
    to = to.resolve()
    to = to / "index.html" if to.is_dir() else to
    if not to.is_file() or not to.is_relative_to(root):
        return "the site has no such file"
    if to.suffix == ".html" and unquote(parts.fragment) not in page(to).names:
        return f"{to.relative_to(root)} has no such anchor"
    return ""
