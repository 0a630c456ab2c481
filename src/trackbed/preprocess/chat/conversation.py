"""Conversations of records: lists of messages, prompts with completions, token ids with masks, and plain texts."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.preprocess.record_error import RecordError

_LISTS: Final = ("messages", "conversations", "conversation")
_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning")
_CALLS: Final = ("tool_calls", "function_call")
_MASKS: Final = ("assistant_masks", "loss_mask")
_IGNORED: Final = -100
_SHOWN: Final = 8

COLUMNS: Final = (*_LISTS, "system", "prompt", "completion", "tools", "chat_template_kwargs")
"""Keys of a conversation that is rendered by a template."""
ID_COLUMNS: Final = ("input_ids", "labels", "seq_start_id", "seq_num_ids", *_MASKS)
"""Keys of a conversation that is tokenised already."""
TEXT: Final = "text"


@dataclass(frozen=True, slots=True)
class Messages:
    """A list of messages, and what else its chat template is given."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """About the number of characters."""
        return sum(len(str(one.get("content") or "")) for one in self.messages)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt, and the completion that is trained on; both text, or both messages."""

    prompt: Any
    completion: Any
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """About the number of characters."""
        if isinstance(self.prompt, str):
            return len(self.prompt) + len(self.completion)
        return Messages([*self.prompt, *self.completion]).size


@dataclass(frozen=True, slots=True)
class WholeText:
    """A text that is trained on as a whole."""

    text: str

    @property
    def size(self) -> int:
        """Number of characters."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Documents that are tokenised already."""

    documents: tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]], ...]
    """`[T]` ids of each document, and `[T]` True for its trained tokens."""
    most_padding: int = 0
    """Most ids at the end of each document that may be padding."""

    @property
    def size(self) -> int:
        """About the number of characters."""
        return 4 * sum(len(ids) for ids, _ in self.documents)


Conversation = Messages | Completion | WholeText | TokenIds


def parse_conversation(fields: Mapping[str, Any]) -> Conversation:
    """Returns the conversation of a record.

    The first of these decides: `messages`, `conversations` or `conversation`, with roles and contents or with `from`
    and `value`; `prompt` and `completion`; `input_ids`; `text`. A value that is null is as one that is missing.

    Raises:
        RecordError: there is none, or it has another form.

    >>> parse_conversation({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]})
    Messages(messages=[{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'}], tools=None,
             variables={})
    """
    for key in _LISTS:
        if fields.get(key) is not None:
            return Messages(_with_system(_messages(fields[key], key), fields), *_further(fields))
    if fields.get("prompt") is not None and fields.get("completion") is not None:
        return _completion(fields)
    if fields.get("input_ids") is not None:
        return _token_ids(fields)
    if fields.get(TEXT) is not None:
        if not isinstance(fields[TEXT], str):
            raise RecordError(f"the value of {TEXT!r} must be a string, found {_kind(fields[TEXT])}")
        return WholeText(fields[TEXT])
    found = ", ".join(map(repr, list(fields)[:_SHOWN])) or "no key"
    raise RecordError(
        f"a conversation must have the key 'messages', 'conversations', 'prompt' and 'completion', 'input_ids' or "
        f"'text', found {found}"
    )


def is_conversation(fields: Mapping[str, Any]) -> bool:
    """True if a record has the keys of a conversation."""
    return any(key in fields for key in (*_LISTS, "input_ids")) or {"prompt", "completion"} <= fields.keys()


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of a table without the keys of nested objects that are null, which the record it was made of lacks.

    A message keeps its `content`, which may be null where it calls tools.

    >>> without_nulls({"messages": [{"role": "user", "content": None, "name": None}], "tools": None})
    {'messages': [{'role': 'user', 'content': None}], 'tools': None}
    """
    return {key: _pruned(value) for key, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(one) for key, one in value.items() if one is not None or key == "content"}
    return [_pruned(one) for one in value] if isinstance(value, list) else value


def _messages(found: Any, key: str) -> list[dict[str, Any]]:
    messages = _from_text(found, key)
    if not isinstance(messages, list) or not messages:
        what = "an empty array" if messages == [] else _kind(messages)
        raise RecordError(f"the value of {key!r} must be an array of messages, found {what}")
    return [one if _is_plain(one) else _message(one, f"{key}[{number}]") for number, one in enumerate(messages)]


def _is_plain(found: Any) -> bool:
    """True for a message of a role and a text alone, as nearly all are: the checks of others take twice as long."""
    return type(found) is dict and len(found) == 2 and type(found.get("role")) is type(found.get("content")) is str


def _with_system(messages: list[dict[str, Any]], fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns messages behind the system's, if a record has that beside them."""
    system = fields.get("system")
    if not system or messages[0]["role"] == "system":
        return messages
    if not isinstance(system, str):
        raise RecordError(f"the value of 'system' must be a string, found {_kind(system)}")
    return [{"role": "system", "content": system}, *messages]


def _message(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise RecordError(f"{where} must be an object, found {_kind(found)}")
    if found.get("weight") not in (None, 1):
        raise RecordError(f"{where} must be trained as the template says, found the weight {found['weight']!r:.20}")
    if "role" not in found and "from" in found:
        role = _ROLES.get(str(found["from"]))
        if role is None:
            raise RecordError(f"{where}: 'from' must be one of {', '.join(_ROLES)}, found {found['from']!r}")
        rest = {name: value for name, value in found.items() if name not in ("from", "value")}
        if found.get("value") is None:
            raise RecordError(f"{where} must have the key 'value', found {', '.join(map(repr, found))}")
        return {"role": role, "content": found["value"], **rest}
    if not isinstance(found.get("role"), str):
        raise RecordError(f"{where} must have the key 'role' with a string, found {found.get('role')!r:.40}")
    if found.get("content") is None and not any(found.get(name) for name in (*_CALLS, *_THOUGHTS)):
        raise RecordError(f"{where} must have a content or tool_calls, found {', '.join(map(repr, found))}")
    if found.keys().isdisjoint(_THOUGHTS):
        return found
    thought = next((found[name] for name in _THOUGHTS if found.get(name) is not None), None)
    # Templates differ in the name that they read; so do the data.
    return found if thought is None else {"thinking": thought, **found, "reasoning_content": thought}


def _completion(fields: Mapping[str, Any]) -> Completion:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion, *_further(fields))
    if isinstance(prompt, list) and isinstance(completion, list):
        return Completion(_messages(prompt, "prompt"), _messages(completion, "completion"), *_further(fields))
    raise RecordError(
        f"'prompt' and 'completion' must be two strings, or two arrays of messages, found {_kind(prompt)} and "
        f"{_kind(completion)}"
    )


def _further(fields: Mapping[str, Any]) -> tuple[list[Any] | None, Mapping[str, Any]]:
    """Returns the tools of a conversation, and the variables of its template."""
    tools = _from_text(fields.get("tools"), "tools")
    variables = _from_text(fields.get("chat_template_kwargs"), "chat_template_kwargs")
    if tools is not None and not isinstance(tools, list):
        raise RecordError(f"the value of 'tools' must be an array, found {_kind(tools)}")
    if variables is not None and not isinstance(variables, dict):
        raise RecordError(f"the value of 'chat_template_kwargs' must be an object, found {_kind(variables)}")
    return [_from_text(one, "tools") for one in tools] if tools else None, variables or {}


def _from_text(value: Any, key: str) -> Any:
    """Returns a value that tables of strings hold as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the value of {key!r} must be an array, or one as JSON, found: {error}") from None


def _token_ids(fields: Mapping[str, Any]) -> TokenIds:
    ids = _integers(fields["input_ids"], "input_ids")
    if fields.get("seq_start_id") is not None:
        return _packed(ids, fields)
    labels = fields.get("labels")
    if labels is None:
        name = next((one for one in _MASKS if fields.get(one) is not None), None)
        mask = np.ones(len(ids), dtype=np.bool_) if name is None else _mask(fields[name], name, len(ids))
        return TokenIds(((ids, mask),))
    wanted = _integers(labels, "labels")
    _check_length(len(wanted), "labels", len(ids))
    trained = wanted != _IGNORED
    wrong = np.flatnonzero(trained & (wanted != ids))
    if len(wrong):
        at = int(wrong[0])
        raise RecordError(
            f"labels[{at}] must be input_ids[{at}] = {ids[at]}, as labels are not shifted, or {_IGNORED}, "
            f"found {wanted[at]}"
        )
    return TokenIds(((ids, trained),))


def _packed(ids: npt.NDArray[np.int64], fields: Mapping[str, Any]) -> TokenIds:
    """Returns the documents of a pack of Megatron-Bridge, whose mask belongs to the place before the trained token.

    A segment has one id more than places, and these are a multiple of what documents are padded to.
    """
    starts = _integers(fields["seq_start_id"], "seq_start_id")
    if not len(starts) or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= len(ids):
        raise RecordError(f"seq_start_id must rise from 0 to below {len(ids)}, found {starts[:_SHOWN].tolist()}")
    name = next((one for one in _MASKS if fields.get(one) is not None), None)
    mask = np.ones(len(ids), dtype=np.bool_) if name is None else _mask(fields[name], name, len(ids))
    sizes = np.diff([*starts, len(ids)])
    stated = fields.get("seq_num_ids")
    num_ids = sizes if stated is None else _integers(stated, "seq_num_ids")
    if len(num_ids) != len(sizes) or (num_ids < 1).any() or (num_ids > sizes).any():
        raise RecordError(
            f"seq_num_ids must be in [1, the ids of a segment], {sizes[:_SHOWN].tolist()}, "
            f"found {num_ids[:_SHOWN].tolist()}"
        )
    documents = []
    for start, size in zip(starts.tolist(), num_ids.tolist(), strict=True):
        trained = np.zeros(size, dtype=np.bool_)
        trained[1:] = mask[start : start + size - 1]
        documents.append((ids[start : start + size], trained))
    multiple = int(np.gcd.reduce(sizes - 1)) if stated is None else 1
    return TokenIds(tuple(documents), most_padding=max(multiple - 1, 0))


def _integers(found: Any, key: str) -> npt.NDArray[np.int64]:
    if isinstance(found, list) and all(type(one) is int for one in found):
        try:
            return np.array(found, dtype=np.int64)
        except OverflowError:
            raise RecordError(f"the value of {key!r} must be 64-bit integers, found larger ones") from None
    raise RecordError(f"the value of {key!r} must be an array of integers, found {_kind(found)}")


def _mask(found: Any, key: str, length: int) -> npt.NDArray[np.bool_]:
    if not isinstance(found, list) or not all(type(one) in (int, bool, float) and one in (0, 1) for one in found):
        raise RecordError(f"the value of {key!r} must be an array of 0 and 1, found {_kind(found)}")
    _check_length(len(found), key, length)
    return np.array(found, dtype=np.bool_)


def _check_length(found: int, key: str, length: int) -> None:
    if found != length:
        raise RecordError(f"{key!r} must have as many values as 'input_ids', {length}, found {found}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    if isinstance(value, list) and value:
        others: Iterable[Any] = (one for one in value if type(one) is not int)
        return f"an array with {_kind(next(iter(others), 0))}"
    return names.get(type(value), "a number")
