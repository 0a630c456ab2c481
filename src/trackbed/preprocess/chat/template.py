"""Chat templates: Jinja programs that write a conversation as text, with marks around what the assistant has said.

They run in Jinja's sandbox, with the functions that templates of Hugging Face expect. What stands between
`{% generation %}` and `{% endgeneration %}` is trained on (https://huggingface.co/docs/transformers/chat_templating).
"""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from trackbed.errors import ArgumentError, TrackbedError
from trackbed.preprocess.chat.sandbox import captures_marks, compile_template
from trackbed.preprocess.record_error import RecordError

_TAG: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_NONCE: Final = secrets.token_hex(8)  # no text of a conversation can be one of the marks
_BEGIN, _END = f"\ufdd0{_NONCE}<", f"\ufdd0{_NONCE}>"
_MARKS: Final = re.compile(f"({re.escape(_BEGIN)}|{re.escape(_END)})")
_FILE: Final = "chat_template.jinja"
_OTHERS: Final = "additional_chat_templates"
_CONFIG: Final = "tokenizer_config.json"
_WITH_TOOLS: Final = "tool_use"


@dataclass(frozen=True, slots=True)
class Variables:
    """Everything but its messages that a template is given."""

    tools: list[Any] | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    prompts: bool = False
    """True to write the beginning of the assistant's next message behind the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """Chat template; picklable."""

    source: str
    """The Jinja program."""
    name: str
    """Path that it was read from, for messages."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by role, such as `bos_token`."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables that all conversations have, unless they have their own."""
    date: str | None = None
    """Today's date, as YYYY-MM-DD, for templates that ask for it; None if that is an error."""
    with_tools: str | None = None
    """The program for conversations with tools; None for the same one."""

    def marks(self, given: Variables) -> bool:
        """True if the template says what the assistant has said."""
        return _is_marked(self._source(given))

    def render(self, messages: list[dict[str, Any]], given: Variables) -> list[str]:
        """Returns the text of a conversation in parts, of which every second one is the assistant's.

        Raises:
            RecordError: the template does not accept the conversation.
            ArgumentError: it asks for a date, and has none.
        """
        source = self._source(given)
        variables = {**self.tokens, **self.variables, **given.others}
        variables |= {"messages": messages, "tools": given.tools, "documents": None}
        variables["add_generation_prompt"] = given.prompts
        try:
            text = _compiled(source, self.date).render(variables)
            plain = _compiled(source, self.date, has_marks=False).render(variables) if _is_captured(source) else None
        except (TrackbedError, MemoryError):
            raise
        except Exception as error:
            raise RecordError(
                f"the chat template {self.name} must accept the conversation, found {type(error).__name__}: {error}"
            ) from error
        parts = _parts(text, self.name)
        if plain is not None and "".join(parts) != plain:
            raise RecordError(
                f"the chat template {self.name} must not look at what stands in {{% generation %}}, found other text "
                "with marks than without: let the block stand where its text is written"
            )
        return parts

    def _source(self, given: Variables) -> str:
        return self.with_tools if given.tools and self.with_tools is not None else self.source


def open_template(name: str, file: Path | None, *, date: str | None, **given: Any) -> ChatTemplate | None:
    """Reads a chat template from a file, or from the folder of a tokenizer; None if that has none.

    Args:
        name: name of the tokenizer, which may be a folder.
        file: file of the template; None for that of the folder.
        date: date for templates that ask for it, as YYYY-MM-DD, or None.
        given: further fields of `ChatTemplate`.

    Raises:
        ArgumentError: there is no such file, it is no template, or the date is none.
    """
    _check_date(date)
    if file is not None:
        try:
            found: dict[str, str] = {"default": file.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"{file}: a chat template must be a file of UTF-8 text, found: {error}") from error
        where = str(file)
    else:
        folder = Path(name) if Path(name).is_dir() else Path(name).parent
        where, found = _of_folder(folder) if Path(name).exists() else (name, {})
    if not found:
        return None
    if "default" not in found:
        raise ArgumentError(f"{where}: a chat template must be named 'default', found {', '.join(found)}")
    template = ChatTemplate(source=found["default"], name=where, date=date, with_tools=found.get(_WITH_TOOLS), **given)
    for source in found.values():
        _check(source, where)
    return template


def _check_date(text: str | None) -> None:
    try:
        if text is not None:
            date.fromisoformat(text)
    except ValueError:
        raise ArgumentError(f"the date of a chat template must be as 2026-01-31, found {text!r}") from None


def _of_folder(folder: Path) -> tuple[str, dict[str, str]]:
    """Returns where the templates of a folder are, and each by its name."""
    path = folder / _FILE
    if path.is_file():
        others = {one.stem: one.read_text(encoding="utf-8") for one in sorted((folder / _OTHERS).glob("*.jinja"))}
        return str(path), {**others, "default": path.read_text(encoding="utf-8")}
    config = folder / _CONFIG
    try:
        found = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return str(folder), {}  # the tokenizer was opened without it
    if isinstance(found, str):
        return str(config), {"default": found}
    named = found if isinstance(found, list) else []
    return str(config), {str(one["name"]): str(one["template"]) for one in named if isinstance(one, dict)}


@lru_cache(maxsize=16)
def _is_marked(source: str) -> bool:
    return _TAG.search(source) is not None


def _check(source: str, where: str) -> None:
    try:
        _compiled(source, None)
    except Exception as error:
        raise ArgumentError(f"{where}: a chat template must be a Jinja template, found: {error}") from error


def _parts(text: str, name: str) -> list[str]:
    """Splits a text at its marks; marks inside of others count as none."""
    pieces = _MARKS.split(text)
    parts, depth = [pieces[0]], 0
    for mark, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        before, depth = depth, depth + (1 if mark == _BEGIN else -1)
        if depth < 0:
            break
        if (before > 0) == (depth > 0):
            parts[-1] += piece
        else:
            parts.append(piece)
    if depth:
        raise RecordError(
            f"the chat template {name} must write what stands in {{% generation %}} as a whole, found a part of it"
        )
    return parts


@lru_cache(maxsize=16)
def _compiled(source: str, day: str | None, *, has_marks: bool = True) -> Any:
    """Returns a template of Jinja."""
    return compile_template(source, marks=(_BEGIN, _END) if has_marks else ("", ""), day=day)


@lru_cache(maxsize=16)
def _is_captured(source: str) -> bool:
    environment = _compiled(source, None).environment
    return captures_marks(environment.parse(source), _BEGIN)
