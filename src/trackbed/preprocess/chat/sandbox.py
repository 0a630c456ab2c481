"""Jinja's sandbox for chat templates, with the block, the functions and the filter that they expect."""

import json
from datetime import date
from typing import Any, Final

from trackbed.datasets.extras import require
from trackbed.errors import ArgumentError

_STR_METHODS: Final = frozenset(
    name for name in dir(str) if not name.startswith("_") and name not in ("format", "format_map")
)
"""Attributes of a string to which the sandbox grants access; it gives the other two a form of its own."""
_PLAIN: Final = frozenset((bool, int, str))
_DICT_NAMES: Final = frozenset(dir(dict))


def compile_template(source: str, *, marks: tuple[str, str], day: str | None) -> Any:
    """Returns a template of Jinja.

    Args:
        source: the program.
        marks: texts that are written before and behind each block `{% generation %}`.
        day: date that the program gets, as YYYY-MM-DD; None if asking for it is an error.
    """
    library = require("jinja2", where="a chat template")
    extensions = require("jinja2.ext", where="a chat template")
    nodes, begin, end = library.nodes, *marks

    class Generation(extensions.Extension):  # type: ignore[misc, name-defined]  # the library may be missing
        """The block `{% generation %}`, whose text is put between two marks."""

        tags = {"generation"}  # noqa: RUF012  as the library wants it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            if any(_leaves(node, nodes) for node in body):
                parser.fail("break and continue must not leave a block generation", line)
            # Variables that are set inside of the block end with it, as in a macro.
            written = [nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (begin, end)]
            return [written[0], nodes.Scope(body).set_lineno(line), written[1]]

    environment = _sandbox(extensions=[Generation, extensions.loopcontrols])
    environment.filters["tojson"] = _to_json

    def refuse(message: str) -> None:
        raise library.exceptions.TemplateError(message)

    def now(form: str) -> str:
        if day is None:
            raise ArgumentError(
                "the chat template asks for today's date, on which the tokens would depend: state one, as with "
                "--chat-date 2026-01-31"
            )
        return date.fromisoformat(day).strftime(form)

    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    # What they return differs from run to run.
    environment.globals.pop("lipsum", None)
    environment.filters.pop("random", None)
    return environment.from_string(source)


def _sandbox(extensions: list[Any]) -> Any:
    """Returns an environment that grants what Jinja's sandbox does, and checks common cases in less time."""
    library = require("jinja2.sandbox", where="a chat template")
    runtime = require("jinja2.runtime", where="a chat template")
    own_kinds = (runtime.LoopContext, require("jinja2.utils", where="a chat template").Namespace)

    class Sandbox(library.ImmutableSandboxedEnvironment):  # type: ignore[misc, name-defined]  # as above
        """Sandbox with a shorter way to keys of dictionaries, methods of strings, and values of loops and namespaces.

        Half of the time of a template went into the general check of what is allowed, which allows all of these.
        """

        def getattr(self, obj: Any, attribute: str) -> Any:
            kind = type(obj)
            if kind is dict and attribute not in _DICT_NAMES:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
            if kind is str and attribute in _STR_METHODS:
                return getattr(obj, attribute)
            if kind in own_kinds and not attribute.startswith("_"):
                value = getattr(obj, attribute, None)
                if type(value) in _PLAIN:
                    return value
            return super().getattr(obj, attribute)

    return Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)


def captures_marks(template: Any, begin: str) -> bool:
    """True if a block `{% generation %}` of a template is read by others: in a macro, or in a variable.

    Args:
        template: source of the program, parsed by its environment.
        begin: text that is written before each block.
    """
    nodes = require("jinja2", where="a chat template").nodes
    captors = (nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.Block)
    return any(
        data.data == begin for captor in template.find_all(captors) for data in captor.find_all(nodes.TemplateData)
    )


def _leaves(node: Any, nodes: Any) -> bool:
    """True if a statement may go on behind a loop that it is not in itself."""
    if isinstance(node, (nodes.Break, nodes.Continue)):
        return True
    return not isinstance(node, nodes.For) and any(_leaves(child, nodes) for child in node.iter_child_nodes())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  templates pass them by place
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Returns a value as JSON without the entities of HTML that Jinja's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
