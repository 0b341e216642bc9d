"""Look at the built site in a browser: ``python docs/check_site.py site``.

1280 pixels wide and light, 400 pixels wide and dark:

- formulas that were not drawn, pictures that do not load or have no description, requests to other hosts;
- pages that have to be scrolled sideways;
- a search that leads elsewhere first: for a public function, or for a phrase of ``PHRASES``.

The browser is any Chromium of the machine (``.ci/browser`` installs one). Without one nothing is checked, and
the last line says so; with ``--need-browser`` that is an error. Links are checked by Sphinx itself, and by
``make linkcheck``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import neula

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
WIDE, NARROW = 1280, 400
PATIENCE = 120_000.0
"""Milliseconds for a page, on a machine that does other work as well."""
ARGUMENTS = ["--disable-background-networking", "--disable-gpu"]
PHRASES = {
    "standard error": "statistics.html",
    "gaussian process": "gaussian-processes.html",
    "slow": "faq.html",
    "weights": "regression.html",
    "cite": "faq.html",
    "logdet": "gaussian-processes.html",
    "jitter": "gaussian-processes.html",
    "out of memory": "larger-than-memory.html",
}
"""The page that a search for a phrase shows first."""


def pages(site: Path) -> list[Path]:
    """The pages of a site."""
    special = {"404.html", "search.html", "genindex.html", "py-modindex.html"}
    pages = (path for path in site.rglob("*.html") if "_static" not in path.parts)
    return sorted(path for path in pages if path.name not in special)


LOOK = """async () => {
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  const found = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  for (const image of document.images)
    if (image.complete && !image.naturalWidth) found.push(`a picture that does not load: ${image.src}`);
    else if (!image.hasAttribute("alt")) found.push(`a picture without a description: ${image.src}`);
  for (const formula of all(".math"))
    if (!formula.querySelector(".katex") || formula.querySelector(".katex-error"))
      found.push(`a formula that is not drawn: ${formula.textContent.trim().slice(0, 60)}`);
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) {
    const wide = all("body *").filter((element) => element.getBoundingClientRect().right > width + 1);
    found.push(`has to be scrolled sideways: ${wide.slice(0, 3).map((e) => e.outerHTML.slice(0, 80))}`);
  }
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
    """Complaints about searches whose first result is another page than the one that answers."""
    functions = {name: f"generated/neula.{name}.html" for name in neula.__all__ if name.islower()}
    for words, wanted in (functions | PHRASES).items():
        page.goto(f"{address}/search.html?q={words}")
        first = page.locator("#search-results ul.search li a").first
        first.wait_for(state="attached")
        place = (first.get_attribute("href") or "").partition("?")[0].partition("#")[0]
        if not place.endswith(wanted):
            yield f"the search for {words!r} leads first to {place}, not to {wanted}"


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of a site on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    server.handle_error = lambda *_: None  # a page that is left while it loads
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
    complaints = list(check_in_browser(options.site, browser)) if browser else []
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
