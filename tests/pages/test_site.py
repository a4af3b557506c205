"""The built site, in the folder that FEDPPL_SITE names: pages are near the front, and links lead somewhere."""

from __future__ import annotations

import os
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

_CLICKS = 3
_OF_SPHINX = {"genindex.html", "search.html", "py-modindex.html", "404.html"}


class Page(HTMLParser):
    """Links, anchors and loaded files of a page, and whether it has formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.formulas = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.anchors.update(told[name] or "" for name in ("id", "name") if name in told)
        self.formulas += tag == "math"
        if tag == "a" and told.get("href"):
            self.links.append(told["href"] or "")
        if tag in ("script", "img") and told.get("src"):
            self.loaded.append(told["src"] or "")
        if tag == "link" and told.get("rel") in ("stylesheet", "preload") and told.get("href"):
            self.loaded.append(told["href"] or "")


@pytest.fixture(scope="module")
def site() -> Path:
    named = os.environ.get("FEDPPL_SITE")
    if not named:
        pytest.skip("FEDPPL_SITE names no built site: python -m sphinx -b html docs build/site")
    assert (Path(named) / "index.html").is_file(), f"FEDPPL_SITE={named} holds no index.html"
    return Path(named).resolve()


@cache
def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def is_elsewhere(link: str) -> bool:
    return "://" in link or link.startswith(("mailto:", "data:", "javascript:", "//"))


def target(page: Path, link: str) -> tuple[Path, str]:
    """File and anchor that a link of a page leads to."""
    path, anchor = urldefrag(link)
    found = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
    return found / "index.html" if found.is_dir() else found, unquote(anchor)


def test_every_page_is_within_three_clicks(site: Path) -> None:
    seen = {site / "index.html"}
    edge = set(seen)
    for _ in range(_CLICKS):
        edge = {target(page, link)[0] for page in edge for link in read(page).links if not is_elsewhere(link)} - seen
        edge = {page for page in edge if page.suffix == ".html" and page.is_file()}
        seen |= edge
    pages = {page for page in site.rglob("*.html") if page.name not in _OF_SPHINX and "_static" not in page.parts}
    assert len(pages) > 30
    assert sorted(str(page.relative_to(site)) for page in pages - seen) == []


def test_no_link_is_dead(site: Path) -> None:
    dead: set[str] = set()
    for page in site.rglob("*.html"):
        if "_static" in page.parts:
            continue
        where = page.relative_to(site)
        for link in [*read(page).links, *read(page).loaded]:
            if is_elsewhere(link):
                continue
            path, anchor = target(page, link)
            lacks = anchor and path.suffix == ".html" and path.is_file() and anchor not in read(path).anchors
            if not path.is_file() or (lacks and anchor not in ("", "#", "top")):
                dead.add(f"{where}: {link}")
    assert sorted(dead) == []


def test_nothing_is_loaded_from_elsewhere_and_formulas_are_drawn_by_the_browser(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if "_static" not in page.parts]
    assert {name for page in pages for name in read(page).loaded if is_elsewhere(name)} == set()
    assert read(site / "ep_in_pictures.html").formulas > 10
