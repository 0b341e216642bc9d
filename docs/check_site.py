r"""What a reader would stumble over on the built site: ``python docs/check_site.py site``.

Always, from the HTML alone:

- formulas that nothing would draw, a raw ``\(``;
- pictures, scripts, style sheets and pages that are not there, or that only the network has;
- pictures without a description.

In a browser, 1280 pixels wide and light, 400 pixels wide and dark:

- formulas that were not drawn, pictures that do not load, anything that is asked of the network;
- pages that have to be scrolled sideways, and parameters that have to be;
- a search for a public function that leads elsewhere first.

The browser is any Chromium of the machine (``.ci/browser`` installs one). If there is none, the second half
is left out, and the last thing said is that it was; with ``--need-browser`` that is an error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import neula

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
WIDE, NARROW = 1280, 400
PATIENCE = 120_000.0
"""Milliseconds for a page, on a machine that does other work as well."""
FORMULAS = ("\\(", "\\[", "$$")
ARGUMENTS = ["--disable-background-networking", "--disable-gpu"]
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


# --- the HTML alone ---------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What is found on one page.

    Attributes
    ----------
    complaints : list of str
    links : list of str
        Of all that the page loads or leads to.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.complaints: list[str] = []
        self.links: list[str] = []
        self._verbatim: list[str] = []  # elements whose text is not to be read as prose
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        verbatim = tag in ("code", "pre", "script", "style", "svg") or "arithmatex" in values.get("class", "")
        if tag not in VOID and (verbatim or self._verbatim):
            self._verbatim.append(tag)
        if tag == "img" and not values.get("alt"):
            self.complaints.append(f"a picture without a description: {values.get('src')}")
        loaded = values.get("src") or (
            tag == "link" and values.get("rel") != "canonical" and values.get("href")
        )
        if loaded and urlsplit(loaded).netloc:
            self.complaints.append(f"is loaded from the network: {loaded}")
        self.links += filter(None, (loaded, tag == "a" and values.get("href")))

    def handle_endtag(self, tag: str) -> None:
        if self._verbatim and tag in self._verbatim:
            while self._verbatim.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not self._verbatim and any(sign in data for sign in FORMULAS):
            self.complaints.append(f"a formula that is not drawn: {data.strip()[:60]}")


def check_html(site: Path) -> Iterator[str]:
    """Complaints about the HTML of a site."""
    for path in pages(site):
        page = Page(path.read_text(encoding="utf-8"))
        missing = {link for link in page.links if not _there(site, path, link)}
        for complaint in (*page.complaints, *(f"leads nowhere: {link}" for link in sorted(missing))):
            yield f"{path.relative_to(site)}: {complaint}"


def pages(site: Path) -> list[Path]:
    """The pages of a site."""
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def _there(site: Path, page: Path, link: str) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return True
    target = site / unquote(urljoin(f"/{page.relative_to(site)}", parts.path)).lstrip("/")
    return target.is_file() or (target / "index.html").is_file()


# --- in a browser -----------------------------------------------------------------------------------------

LOOK = """async () => {
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  const found = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  for (const image of document.images)
    if (image.complete && !image.naturalWidth) found.push(`a picture that does not load: ${image.src}`);
  for (const formula of all(".arithmatex"))
    if (!formula.querySelector(".katex") || formula.querySelector(".katex-error"))
      found.push(`a formula that is not drawn: ${formula.textContent.trim().slice(0, 60)}`);
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) {
    const wide = all("body *").filter((element) => element.getBoundingClientRect().right > width + 1);
    found.push(`has to be scrolled sideways: ${wide.slice(0, 3).map((e) => e.outerHTML.slice(0, 80))}`);
  }
  for (const box of all(".doc-contents .md-typeset__scrollwrap"))
    if (box.scrollWidth > box.clientWidth + 1)
      found.push(`parameters that have to be scrolled sideways: ${box.textContent.trim().slice(0, 60)}`);
  return found;
}"""


def check_in_browser(site: Path, executable: str) -> Iterator[str]:
    """Complaints about a site as a browser shows it."""
    from playwright.sync_api import sync_playwright

    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": WIDE, "height": 900})
        page.set_default_timeout(PATIENCE)
        asked, failed = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("response", lambda answer: failed.append(answer.url) if answer.status >= 400 else None)
        page.on("pageerror", lambda error: failed.append(str(error)))
        yield from _search(page, address)
        for width, scheme in ((WIDE, "light"), (NARROW, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            for path in pages(site):
                name = path.relative_to(site).as_posix()
                page.goto(f"{address}/{name}")
                yield from (f"{name}, {width} pixels: {complaint}" for complaint in page.evaluate(LOOK))
        browser.close()
    yield from (f"fails: {what}" for what in dict.fromkeys(failed))
    outside = (url for url in dict.fromkeys(asked) if not url.startswith((address, "data:", "blob:")))
    yield from (f"asked of the network: {url}" for url in outside)


def _search(page: Any, address: str) -> Iterator[str]:
    """Complaints about searches for public functions whose first result is not their description."""
    for name in (name for name in neula.__all__ if name.islower()):
        page.goto(f"{address}/?q={name}")
        first = page.locator(".md-search-result__link").first
        first.wait_for(state="attached")
        place = first.get_attribute("href")
        if "/api/functions/" not in place:
            yield f"the search for {name} leads first to {place}"


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of a site on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def find_browser() -> str | None:
    """A Chromium of this machine: on the path, or one that Playwright has installed."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found:
        return found
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


def main() -> int:
    """Check, say what was found, and what was not looked at."""
    parser = argparse.ArgumentParser(description="Look at the built site.")
    parser.add_argument("site", type=Path, nargs="?", default=Path("site"))
    parser.add_argument("--find-browser", action="store_true", help="only say which browser there is")
    parser.add_argument("--need-browser", action="store_true", help="no browser is an error")
    options = parser.parse_args()
    browser = find_browser()
    if options.find_browser:
        print(browser or "no browser")
        return 0 if browser else 1
    complaints = list(check_html(options.site))
    if browser:
        complaints += check_in_browser(options.site, browser)
    print(*complaints, sep="\n")
    count = len(pages(options.site))
    print(f"{count} pages, {len(complaints)} complaints; looked at with {browser or 'NO BROWSER'}")
    if not browser:
        print(NOT_LOOKED_AT, file=sys.stderr)
    return 1 if complaints or (options.need_browser and not browser) else 0


NOT_LOOKED_AT = f"""
{"!" * 88}
!!! THE PAGES WERE NOT LOOKED AT: there is no Chromium on this machine.
!!! Formulas, pictures, widths and the search are unchecked. `.ci/browser` installs one.
{"!" * 88}"""


if __name__ == "__main__":
    sys.exit(main())
