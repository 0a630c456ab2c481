"""Builds the site of the documentation into a folder: `make site`.

The pages are those of `docs`, as they are, and a few of the repository around them, under `project`. Links between them
are followed to where they lie in the site; one that leads nowhere fails, as does any warning of Sphinx, or a page that
would ask another host for anything.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PROJECT = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")
"""Pages outside `docs`, which lie under `project` in the site."""
SECTIONS = {
    "Start": ["tutorial.md", "concepts.md", "README.md"],
    "How to": ["how-to/*.md"],
    "Explanation": ["explanation/*.md"],
    "Look up": ["reference/*.md", "glossary.md", "troubleshooting.md"],
    "Names": ["names/*.md"],
    "Formats": ["formats/*.md"],
    "Project": ["project/*.md", "adr/*.md"],
}
_LINK = re.compile(r"(?P<head>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<tail>\))")
_FENCE = re.compile(r"^\s*(```|~~~)")
_REQUEST = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)="(?:https?:)?//[^"]*"')


def places(reference: Path) -> dict[Path, str]:
    """Place in the site of each file of the repository that is part of it, and of each page of the reference."""
    found = {path: path.relative_to(DOCS).as_posix() for path in sorted(DOCS.rglob("*")) if path.is_file()}
    found = {path: place for path, place in found.items() if path.suffix in (".md", ".svg", ".png", ".ipynb")}
    found = {path: place for path, place in found.items() if not place.startswith("site/")}
    found[DOCS / "site" / "index.md"] = "index.md"
    found |= {path: f"names/{path.name}" for path in sorted(reference.resolve().glob("*.md"))}
    return found | {ROOT / name: f"project/{Path(name).name}" for name in PROJECT}


def staged(path: Path, known: dict[Path, str], problems: list[str]) -> str:
    """The text of a page, with links to where pages lie in the site."""
    own = Path(known[path]).parent

    def replaced(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        wanted = (path.parent / target).resolve()
        if wanted.is_dir() and wanted / "index.md" not in known:
            wanted = next((one for one in sorted(known) if one.parent == wanted), wanted)
        if wanted in known:
            place = os.path.relpath(known[wanted], own)
            return f"{match['head']}{place}{anchor}{match['tail']}"
        if wanted.is_file():  # another file of the repository, which the page offers for download
            place = os.path.relpath(f"files/{wanted.relative_to(ROOT)}", own)
            return f"{match['head']}{place}{match['tail']}"
        problems.append(f"{known[path]}: the link {target} must lead to a file, found none")
        return match[0]

    lines, is_code = [], False
    for line in path.read_text().splitlines():
        is_code ^= bool(_FENCE.match(line))
        lines.append(line if is_code else _LINK.sub(replaced, line))
    return "\n".join(lines) + "\n"


def toctrees(known: dict[Path, str]) -> Iterator[str]:
    """The tables of contents of the first page."""
    listed = set(known.values())
    for caption, patterns in SECTIONS.items():
        names = [name for pattern in patterns for name in sorted(listed) if Path(name).match(pattern)]
        names = [name for name in names if "/" in name or name in patterns]
        yield "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *dict.fromkeys(names), "```"])


def write_source(folder: Path, reference: Path) -> list[str]:
    """Writes the source folder of Sphinx. Returns what is wrong with links."""
    known = places(reference)
    problems: list[str] = []
    for path, place in known.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copyfile(path, target)
            continue
        text = staged(path, known, problems)
        target.write_text(text.replace("<!-- toctrees -->", "\n\n".join(toctrees(known))))
        for name in re.findall(r"\]\((?:\.\./)*files/([^)#]+)\)", text):
            copy = folder / "files" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy)
    shutil.copyfile(DOCS / "site" / "conf.py", folder / "conf.py")
    return problems


def requests_of(folder: Path) -> list[str]:
    """Requests to other hosts that pages would make."""
    pages = sorted(folder.rglob("*.html"))
    found = [(page.relative_to(folder), one) for page in pages for one in _REQUEST.findall(page.read_text())]
    return [f"{page}: must ask no other host, found {one[:120]}" for page, one in found]


def main() -> int:
    """Builds the site; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="FOLDER", help="folder of the site, made anew")
    parser.add_argument("--reference", type=Path, required=True, metavar="FOLDER", help="pages that reference.py wrote")
    given = parser.parse_args()
    output = given.output
    version = (ROOT / "src" / "trackbed" / "version.py").read_text().split('"')[-2]
    with tempfile.TemporaryDirectory() as place:
        problems = write_source(Path(place), given.reference)
        if not problems:
            shutil.rmtree(output, ignore_errors=True)
            options = ["--builder", "html", "--fail-on-warning", "--keep-going", "--quiet"]
            command = [sys.executable, "-m", "sphinx", *options]
            environment = {**os.environ, "TRACKBED_VERSION": version}
            status = subprocess.run([*command, place, str(output)], env=environment, check=False).returncode
            if status:
                return status
            problems = requests_of(output)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{output / 'index.html'}: {len(list(output.rglob('*.html')))} pages")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
