"""Writes the reference of the site from signatures and docstrings: `python docs/site/reference.py FOLDER`.

A page for each package with public names, and on it first those that the documentation uses.
"""

import argparse
import ast
import dataclasses
import enum
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FACADES = (
    "trackbed",
    "trackbed.preprocess",
    "trackbed.tokens",
    "trackbed.datasets",
    "trackbed.builder",
    "trackbed.blends",
    "trackbed.loading",
    "trackbed.losses",
    "trackbed.ledger",
    "trackbed.grads",
    "trackbed.optim",
    "trackbed.checkpoint",
    "trackbed.comm",
    "trackbed.index",
    "trackbed.megatron",
    "trackbed.errors",
)
FURTHER = """
## Further names

The documentation does not use them; most are for code that was written for Megatron Core.
"""
WIDTH = 130
_CALLS = {"__iter__": "iter(self)", "__len__": "len(self)"}
# Members whose place the words of the pages do not tell: a program needs these, and none of those.
_FOR_PROGRAMS = {"close", "param_groups", "validation_sets"}
_FOR_EXTENSIONS = {"exchange"}
# Classes of other packages that programs call, so that their methods are described like those of `trackbed`.
_CALLED = {"IndexedDatasetBuilder"}


def make_pages() -> dict[str, str]:
    """Returns the text of each page, by file name."""
    used = _used_words() | _results(_used_words())
    return {f"{facade}.md": _page(facade, used) for facade in FACADES}


@cache
def _used_words() -> set[str]:
    """Returns the words of all code on the pages that a user reads."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for folder in ("how-to", "formats", "explanation"):
        pages += (ROOT / "docs" / folder).glob("*.md")
    code = [part for page in pages for part in re.findall(r"```.*?```|`[^`]+`", page.read_text(), flags=re.DOTALL)]
    return {word for part in code for word in re.findall(r"\w+", part)}


def _results(used: set[str]) -> set[str]:
    """Returns the words of the results of functions that are used."""
    functions = [getattr(import_module(facade), name) for facade in FACADES for name in import_module(facade).__all__]
    found = [_result(one) for one in functions if isinstance(one, types.FunctionType) and one.__name__ in used]
    return {word for text in found for word in re.findall(r"\w+", text)}


def _page(facade: str, used: set[str]) -> str:
    module = import_module(facade)
    names = sorted(module.__all__, key=lambda one: (one.startswith("_"), one.lower()))
    main = [name for name in names if facade == "trackbed" or name in used]
    others = [name for name in names if name not in main]
    entries = ["".join(f"\n### `{name}`\n\n{_entry(facade, name)}" for name in part) for part in (main, others)]
    further = f"{FURTHER if main else ''}{entries[1]}" if others else ""
    return f"# `{facade}`\n\n{_text(module.__doc__)}\n## Names\n{entries[0]}{further}"


def _entry(facade: str, name: str) -> str:
    found = getattr(import_module(facade), name)
    if facade != "trackbed" and getattr(import_module("trackbed"), name, None) is found:
        return f"The same as [`trackbed.{name}`](trackbed.md#{name.lower()}).\n"
    if isinstance(found, type):
        return _class(name, found, is_whole=facade == "trackbed" or name in _CALLED)
    if isinstance(found, types.FunctionType):
        return f"{_signature(name, found)}{_text(found.__doc__)}"
    if callable(found) and not isinstance(found, (types.GenericAlias, types.UnionType)):
        return f"{_signature(name, found)}{_text(getattr(found, '__doc__', None))}"
    return f"{_code(f'{name} = {_plain(found)}')}{_text(_constant_text(facade, name))}"


def _constant_text(facade: str, name: str) -> str:
    """Returns the text that follows the assignment of a constant in the module that a facade takes it from."""
    imports = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(import_module(facade))))
        if isinstance(node, ast.ImportFrom) and any(alias.asname == name for alias in node.names)
    ]
    source = import_module(str(imports[0].module) if imports else facade)
    for before, after in pairwise(ast.parse(inspect.getsource(source)).body):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        targets = before.targets if isinstance(before, ast.Assign) else [getattr(before, "target", None)]
        if is_text and any(isinstance(one, ast.Name) and one.id == name for one in targets):
            return inspect.cleandoc(str(after.value.value))
    return ""


def _class(name: str, found: type, *, is_whole: bool) -> str:
    """Returns the text of a class; with `is_whole` its methods have their docstrings, otherwise the first sentence."""
    parts = [_text(found.__doc__)]
    if dataclasses.is_dataclass(found):
        parts.append(_fields(found))
    elif issubclass(found, Exception) or typing.is_typeddict(found) or getattr(found, "_is_protocol", False):
        bases = ", ".join(base.__name__ for base in found.__bases__ if base is not object)
        parts.insert(0, _code(f"class {name}({bases})"))
    else:
        parts.insert(0, _signature(name, found))
    used = (_used_words() | _FOR_PROGRAMS) - _FOR_EXTENSIONS if is_whole else set()
    entries = {one: (one in used or (is_whole and one in _CALLS), value) for one, value in _members(found).items()}
    members = [
        line for one, (is_used, value) in entries.items() if is_used for line in _member(one, value, is_whole=True)
    ]
    others = [
        line for one, (is_used, value) in entries.items() if not is_used for line in _member(one, value, is_whole=False)
    ]
    members += [
        *(["For code that was written for Megatron Core, and for extensions:\n\n"] if members and others else []),
        *others,
    ]
    return "\n".join([*(part.rstrip() + "\n" for part in parts if part), *(["".join(members)] if members else [])])


def _members(found: type) -> dict[str, Any]:
    """Returns the attributes of a class and of those of its bases that are Trackbed's."""
    members: dict[str, Any] = {}
    for base in found.__mro__:
        if base.__module__.startswith("trackbed."):
            members |= {name: value for name, value in vars(base).items() if name not in members}
    return members


def _member(name: str, value: Any, *, is_whole: bool) -> Iterator[str]:
    """Yields the text of a public method or property."""
    function = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "func", None) or value
    document = inspect.getdoc(function) or ""
    is_public = not name.startswith("_") or (is_whole and name in _CALLS)
    if not is_public or not isinstance(function, types.FunctionType) or not document:
        return
    is_method = isinstance(value, (types.FunctionType, classmethod, staticmethod))
    call = _CALLS.get(name) or (f"{name}({_parameters(function)})" if is_method else name)
    if is_whole:
        head = f"{call}{_result(function)}" if is_method else f"{call}{_result(function).replace(' -> ', ': ', 1)}"
        yield f"#### `{head}`\n\n{_text(document)}\n"
    else:
        first = document.split("\n\n")[0].replace("\n", " ")
        yield f"- `{call}`: {first}\n"


def _parameters(function: Any) -> str:
    """Returns the parameters of a method with their stars and defaults, without types."""
    parts, is_keyword = [], False
    for one in list(inspect.signature(function).parameters.values()):
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and not is_keyword and not any(part.startswith("*") for part in parts):
            parts.append("*")
        is_keyword = is_keyword or one.kind is one.KEYWORD_ONLY
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        parts.append(f"{star}{one.name}{'' if one.default is one.empty else f'={_plain(one.default)}'}")
    return ", ".join(parts)


def _result(function: Any) -> str:
    if inspect.isgeneratorfunction(getattr(function, "__wrapped__", None)):
        return ", a context manager"
    result = inspect.signature(function).return_annotation
    return "" if result in (inspect.Signature.empty, None, "None") else f" -> {_annotation(result)}"


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
    """Returns the call of a function or class, or each of its calls."""
    function = found.__init__ if isinstance(found, type) else found
    calls = typing.get_overloads(function) if isinstance(function, types.FunctionType) else []
    return "".join(_call(name, one, is_class=isinstance(found, type)) for one in calls or [found])


def _call(name: str, found: Any, *, is_class: bool) -> str:
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):
        return ""
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
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
        if one.kind is one.POSITIONAL_ONLY:
            parts = [part for part in parts if part != "/"] + ["/"]
    result = signature.return_annotation
    end = "" if result in (signature.empty, None, "None") or is_class else f" -> {_annotation(result)}"
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) > WIDTH:
        line = "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])
    return _code(line)


def _annotation(found: Any) -> str:
    if typing.get_origin(found) is typing.Union:
        return " | ".join("None" if one is type(None) else _annotation(one) for one in typing.get_args(found))
    text = found if isinstance(found, str) else inspect.formatannotation(found)
    text = re.sub(r"Optional\[(Literal\[[^]]*\])\]", r"\1 | None", text)
    text = re.sub(r"ForwardRef\('([^']*)'[^)]*\)", r"\1", text)
    return re.sub(r"\b(?:[a-zA-Z_]\w*\.)+(?=[A-Za-z_])", "", text)


def _plain(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
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


def main() -> None:
    """Writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of the pages")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for page, text in make_pages().items():
        (folder / page).write_text(text)


if __name__ == "__main__":
    main()
