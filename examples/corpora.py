"""Three corpora of real text that every machine with Python has."""

import json
import pydoc_data.topics
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

STDLIB = Path(sysconfig.get_paths()["stdlib"])
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])


def sources() -> Iterator[str]:
    """The standard library's modules."""
    for path in sorted(STDLIB.rglob("*.py")):
        if not {"site-packages", "test", "tests", "idle_test", "pydoc_data"} & set(path.parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def topics() -> Iterator[str]:
    """What `help("topics")` can tell."""
    yield from (text for _, text in sorted(pydoc_data.topics.topics.items()))


def papers() -> Iterator[str]:
    """Metadata and licences of the installed packages."""
    for folder in sorted(SITE_PACKAGES.glob("*.dist-info")):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and (path.name == "METADATA" or "LICEN" in path.name.upper()):
                yield path.read_text(encoding="utf-8", errors="replace")


CORPORA = {"sources": sources, "topics": topics, "papers": papers}


def write(folder: Path) -> dict[str, Path]:
    """One JSONL file per corpus, by name."""
    paths = {}
    for name, texts in CORPORA.items():
        paths[name] = folder / f"{name}.jsonl"
        with paths[name].open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts())
    return paths


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
