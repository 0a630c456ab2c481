"""Records made by hand, and checks of pages of HTML."""

import json
import re
from html.parser import HTMLParser

VOID = {"br", "link", "meta"}
BLEND = """version = 1
sequence_length = 16
order = "instant"
split = "100"
size = {train = 4000}
tokenizer = {eod = 0, vocab_size = 1000}
"""


class Page(HTMLParser):
    """A page whose tags are balanced: its elements, and the text in each kind of element."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.source, self.elements, self.texts, self.open = text, [], [], []
        self.feed(text)
        self.close()
        assert self.open == []
        assert not self.rawdata

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.append((self.open[-1], data))

    def text_of(self, tag):
        return [text for name, text in self.texts if name == tag]

    def all_text(self):
        return " ".join(text for name, text in self.texts if name != "style")

    def sections(self):
        return [attributes["id"] for tag, attributes, _ in self.elements if tag == "section"]


def check_page(text):
    """Checks that a page is well-formed, needs nothing from elsewhere, and describes its pictures. Returns it."""
    page = Page(text)
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes, _ in page.elements:
        assert tag not in ("script", "iframe", "object", "embed", "img", "image", "use", "base", "form")
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("href", "src", "xlink:href", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:,")), attributes
            if attributes.get(name, "").startswith("#"):
                assert attributes[name][1:] in ids
    (style,) = page.text_of("style")
    assert "url(" not in style
    assert "@import" not in style
    pictures = re.findall(r"<svg[^>]*>(?:<[^>]*>)", text)
    assert len(pictures) == text.count("<svg")
    for picture in pictures:
        assert 'role="img"' in picture
        assert "viewBox=" in picture
        assert re.search(r"<title[ >]", picture)
    for tag, attributes, _ in page.elements:
        if tag == "svg" and "aria-labelledby" in attributes:
            assert set(attributes["aria-labelledby"].split()) <= set(ids)
    assert "nan" not in re.findall(r'(?:d|x|y|width|height|transform)="([^"]*)"', text)
    assert not re.search(r'(?: d| x| y| width| height| transform)="[^"]*(?:nan|inf)', text)
    return page


def write_record(folder, events, steps, blend=None):
    """Writes the files of a record. Events "begin" get the bytes of the steps before them, by their number of lines."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(step).encode() + b"\n" for step in steps]
    (folder / "steps.jsonl").write_bytes(b"".join(lines))
    written = []
    for event in events:
        lines_before = event.pop("lines_before", None)
        if lines_before is not None:
            event["steps_bytes"] = sum(map(len, lines[:lines_before]))
        written.append(json.dumps(event) + "\n")
    (folder / "events.jsonl").write_text("".join(written))
    if blend is not None:
        (folder / "blends").mkdir(exist_ok=True)
        (folder / "blends" / "1.toml").write_text(BLEND + blend)
    return folder


def opened(time=1e9, **fields):
    return {"event": "open", "time": time, "host": "host", "process": 7, "num_ranks": 2, "trackbed": "0.1.0", **fields}


def began(lines_before=0, after_step=0, time=1e9 + 5, **fields):
    return {"event": "begin", "time": time, "after_step": after_step, "lines_before": lines_before, **fields}


def step(number, **fields):
    line = {"step": number, "first_sample": 8 * (number - 1), "num_samples": 8, "num_ranks": 2, "loss": 3.0 / number}
    datasets = {"0": [96, 2.5], "1": [32, 3.5]}
    waits = {"stall_seconds": 0.25, "checkpoint_seconds": 0.0, "communication_seconds": 0.5}
    return {**line, "datasets": datasets, "grad_norm": 1.0, **waits, "batch_hash": "a" * 64, **fields}
