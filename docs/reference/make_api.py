"""Writes `api.md`, the public names with their signatures and docstrings: `python docs/reference/make_api.py`."""

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
FACADES = (
    "trackbed",
    "trackbed.preprocess",
    "trackbed.tokens",
    "trackbed.datasets",
    "trackbed.builder",
    "trackbed.loading",
    "trackbed.grads",
    "trackbed.optim",
    "trackbed.checkpoint",
    "trackbed.index",
    "trackbed.megatron",
    "trackbed.errors",
)
HEAD = """# Public names

Made from the signatures and docstrings by `python docs/reference/make_api.py`; a test compares the two. A name is
public if it is listed here ([ADR 5](../adr/0005-what-is-public.md)); all others may change without notice.

A program of your own needs the names of [`trackbed`](#trackbed), and of other packages those that the pages under
`docs/how-to` use. The rest is there for code that was written for Megatron Core: names, arguments and their order are
Megatron Core's, also where they would be others in a new library.

"""
WIDTH = 130


def make_page() -> str:
    """Returns the page."""
    contents = "".join(f"- [`{facade}`](#{facade.replace('.', '')})\n" for facade in FACADES)
    return HEAD + contents + "".join(section for facade in FACADES for section in _sections(facade))


def _sections(facade: str) -> Iterator[str]:
    module = import_module(facade)
    yield f"\n## `{facade}`\n\n{_text(module.__doc__)}"
    for name in sorted(module.__all__, key=lambda one: (one.startswith("_"), one.lower())):
        yield f"\n### `{name}`\n\n{_entry(facade, name, getattr(module, name))}"


def _entry(facade: str, name: str, found: Any) -> str:
    home = getattr(found, "__module__", facade)
    if facade == "trackbed" and home.split(".")[1:2] not in ([], ["top_level"]):
        package = ".".join(home.split(".")[:2])
        return f"The same object as `{package}.{name}`.\n"
    if isinstance(found, type):
        return _class(name, found)
    if isinstance(found, types.FunctionType):
        return f"{_signature(name, found)}{_text(found.__doc__)}"
    if callable(found) and not isinstance(found, (types.GenericAlias, types.UnionType)):
        return f"{_signature(name, found)}{_text(getattr(found, '__doc__', None))}"
    return f"{_code(f'{name} = {_plain(found)}')}"


def _class(name: str, found: type) -> str:
    parts = [_text(found.__doc__)]
    if dataclasses.is_dataclass(found):
        parts.append(_fields(found))
    elif issubclass(found, Exception) or typing.is_typeddict(found) or getattr(found, "_is_protocol", False):
        bases = ", ".join(base.__name__ for base in found.__bases__ if base is not object)
        parts.insert(0, _code(f"class {name}({bases})"))
    else:
        parts.insert(0, _signature(name, found))
    members = [line for member, value in _members(found).items() for line in _member(member, value)]
    return "\n".join([*(part.rstrip() + "\n" for part in parts if part), *(["".join(members)] if members else [])])


def _members(found: type) -> dict[str, Any]:
    """Returns the attributes of a class and of those of its bases that are Trackbed's."""
    members: dict[str, Any] = {}
    for base in found.__mro__:
        if base.__module__.startswith("trackbed."):
            members |= {name: value for name, value in vars(base).items() if name not in members}
    return members


def _member(name: str, value: Any) -> Iterator[str]:
    """Yields a line for a public method or property."""
    function = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None) or value
    first = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    if name.startswith("_") or not isinstance(function, types.FunctionType) or not first:
        return
    is_method = isinstance(value, (types.FunctionType, classmethod, staticmethod))
    names = [one for one in inspect.signature(function).parameters if one not in ("self", "cls")] if is_method else []
    yield f"- `{name}{'(' + ', '.join(names) + ')' if is_method else ''}`: {first}\n"


def _fields(found: type) -> str:
    """Returns the fields of a dataclass as a list, with the text that follows each in the source."""
    texts: dict[str, str] = {}
    for base in reversed(found.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _field_texts(base)
    lines = []
    for field in dataclasses.fields(found):
        if field.name.startswith("_"):
            continue
        default = "" if field.default is dataclasses.MISSING else f" = {_plain(field.default)}"
        text = texts.get(field.name, "")
        head = f"{field.name}: {_annotation(field.type)}{default if field.init else ''}"
        lines.append(f"- `{head}`{': ' if text else ''}{text}{'' if field.init else ' Set by the object itself.'}\n")
    return "".join(lines)


def _field_texts(found: type) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(found))).body
    texts = {}
    body = getattr(node, "body", [])
    for before, after in pairwise(body):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and is_text:
            texts[before.target.id] = " ".join(inspect.cleandoc(after.value.value).split())
    return texts


def _signature(name: str, found: Any) -> str:
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):
        return ""
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    parts, is_keyword = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            if not any(other.kind is other.VAR_POSITIONAL for other in parameters):
                parts.append("*")
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        hint = "" if one.annotation is one.empty else f": {_annotation(one.annotation)}"
        default = "" if one.default is one.empty else f" = {_plain(one.default)}"
        parts.append(f"{star}{one.name}{hint}{default}")
    result = signature.return_annotation
    end = "" if result in (signature.empty, None) or isinstance(found, type) else f" -> {_annotation(result)}"
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])
    return _code(line)


def _annotation(found: Any) -> str:
    text = found if isinstance(found, str) else inspect.formatannotation(found)
    text = re.sub(r"Optional\[(Literal\[[^]]*\])\]", r"\1 | None", text)
    text = re.sub(r"ForwardRef\('([^']*)'[^)]*\)", r"\1", text)
    return re.sub(r"\b(?:[a-zA-Z_]\w*\.)+(?=[A-Za-z_])", "", text)


def _plain(value: Any) -> str:
    text = f"{value.__module__}.{value.__qualname__}" if isinstance(value, types.FunctionType) else repr(value)
    return re.sub(r" at 0x[0-9a-f]+|\b(?:[a-zA-Z_]\w*\.)+(?=[A-Za-z_])", "", text)


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n\n"


def _text(docstring: str | None) -> str:
    """Returns a docstring as Markdown: sections become bold heads with lists, examples are dropped."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    out: list[str] = []
    is_list = False
    for number, line in enumerate(lines):
        if line.startswith(">>> "):
            while out and (not out[-1] or out[-1].endswith(":")):  # the sentence that introduces the example
                out.pop()
            break
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if re.fullmatch(r"[A-Z][a-z]+:", line) and following.startswith("    "):
            is_list = True
            out.append(f"**{line[:-1]}**\n")
        elif not is_list:
            out.append(line)
        elif re.match(r"    \*{0,2}\w[\w, ]*: ", line):
            name, text = line.strip().split(": ", 1)
            out.append(f"- `{name}`: {text}")
        elif line.startswith("        "):
            out.append(f"  {line.strip()}")
        else:
            out.append(line.strip() if line.startswith("    ") else line)
    return "\n".join(out).rstrip() + "\n" if out else ""


if __name__ == "__main__":
    PAGE.write_text(make_page())
