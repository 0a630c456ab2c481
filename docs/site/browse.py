"""Opens every page of a folder in Chromium, and says what is wrong with it: `make browse`.

A page must show without an error and without a request to another host, at the width of a telephone and of a large
screen: no wider than the window, its text no smaller than that of a footnote, every picture with a text. Where the
folder has a search, it must find the words that are given.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Browser, Page, sync_playwright

WIDTHS = (400, 1600)
HEIGHT = 1000
SMALLEST_TEXT = 12.0
"""Pixels."""
FOUND_WITHIN = 20_000
"""Milliseconds that a search may take."""
_LOOK = """() => {
  const seen = element => element.getClientRects().length > 0;
  const problems = [];
  const width = document.documentElement.scrollWidth;
  if (width > window.innerWidth + 1) problems.push(`must be no wider than ${window.innerWidth} pixels, found ${width}`);
  for (const image of document.querySelectorAll("img")) {
    if (!image.alt.trim()) problems.push(`a picture must have a text, found none: ${image.src.slice(0, 100)}`);
    if (image.complete && image.naturalWidth === 0) problems.push(`a picture must show: ${image.src.slice(0, 100)}`);
  }
  for (const drawing of document.querySelectorAll("svg")) {
    const link = drawing.closest("a, button, label");
    const isHidden = !seen(drawing) || drawing.closest("[aria-hidden=true]");
    const named = drawing.getAttribute("aria-label") || drawing.querySelector(":scope > title");
    const control = link && (link.control || link);  // that of a label
    const linked = control && (link.textContent.trim() || control.getAttribute("aria-label"));
    if (!isHidden && !named && !linked) problems.push(`a drawing must have a text: ${drawing.outerHTML.slice(0, 100)}`);
  }
  const main = document.querySelector("article, main") || document.body;
  for (const element of main.querySelectorAll("p, li, td, th, pre")) {
    const size = parseFloat(getComputedStyle(element).fontSize);
    if (seen(element) && size < SMALLEST)
      problems.push(`text must be ${SMALLEST} pixels high, found ${size}: ${element.textContent.slice(0, 60)}`);
  }
  return problems;
}""".replace("SMALLEST", str(SMALLEST_TEXT))


def watch(page: Page, problems: list[str]) -> None:
    """Adds the errors of a page and its requests to others to the problems."""

    def on_request(request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:", "about:")):
            problems.append(f"must ask no other host, found {request.url[:120]}")

    page.on("request", on_request)
    page.on("requestfailed", lambda request: problems.append(f"must find {request.url[:120]}"))
    page.on("pageerror", lambda error: problems.append(f"must run without an error, found {error}"))
    page.on("console", lambda said: problems.append(f"console: {said.text}") if said.type == "error" else None)


def look_at(page: Page, path: Path, problems: list[str]) -> Iterator[str]:
    """Yields what is wrong with a file at the width that the page has."""
    problems.clear()
    page.goto(path.resolve().as_uri(), wait_until="load")
    problems += page.evaluate(_LOOK)
    yield from dict.fromkeys(problems)


def look_at_all(browser: Browser, folder: Path) -> Iterator[str]:
    """Yields what is wrong with the pages of a folder."""
    for width in WIDTHS:
        page = browser.new_page(viewport={"width": width, "height": HEIGHT})
        problems: list[str] = []
        watch(page, problems)
        for path in sorted(folder.rglob("*.html")):
            for problem in look_at(page, path, problems):
                yield f"{path.relative_to(folder)} at {width} pixels: {problem}"
        page.close()


def search(browser: Browser, folder: Path, word: str) -> Iterator[str]:
    """Yields what is wrong with the search for a word."""
    page = browser.new_page()
    problems: list[str] = []
    watch(page, problems)
    page.goto(f"{(folder / 'search.html').resolve().as_uri()}?{urlencode({'q': word})}")
    try:
        page.wait_for_selector("#search-results li a", timeout=FOUND_WITHIN)
    except Exception as error:  # noqa: BLE001  what it raises is no public class
        problems.append(f"must find a page, found none ({type(error).__name__})")
    print(f"search for {word}: {', '.join(page.locator('#search-results li a').all_inner_texts()[:3])}, ...")
    page.close()
    yield from (f"search for {word}: {problem}" for problem in problems)


def main() -> int:
    """Looks at all pages; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the pages")
    parser.add_argument("--search", nargs="*", default=[], metavar="WORD", help="words that the search must find")
    parser.add_argument("--picture", nargs=3, metavar=("PAGE", "WIDTH", "FILE"), help="write the picture of a page")
    given = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("browse: chromium must be on PATH, found none: apt-get install chromium", file=sys.stderr)
        return 2
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        if given.picture is not None:
            name, width, file = given.picture
            page = browser.new_page(viewport={"width": int(width), "height": HEIGHT})
            page.goto((given.folder / name).resolve().as_uri(), wait_until="load")
            page.screenshot(path=file)
            return 0
        problems = [*look_at_all(browser, given.folder)]
        problems += [problem for word in given.search for problem in search(browser, given.folder, word)]
        browser.close()
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(list(given.folder.rglob('*.html')))} pages at {len(WIDTHS)} widths, {len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
