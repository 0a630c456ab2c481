"""Options of conversations."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trackbed.datasets.tokenizers.kinds import maps_special_tokens
from trackbed.errors import ArgumentError
from trackbed.preprocess.chat.encode import ChatRules, TrainOn
from trackbed.preprocess.chat.template import ChatTemplate, open_template

logger = logging.getLogger(__name__)

CHAT_KEY: Final = "chat"
"""Key in the names of the pairs of conversations."""
TRAIN_ON: Final[tuple[TrainOn, ...]] = ("marks", "all")
_SPECIAL: Final = re.compile(r"<\|[\w-]+\|>|<(?:start|end)_of_\w+>")
"""Special tokens, as most models name them."""
_SHOWN: Final = 4
_RESERVED: Final = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
_ROLES: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Conversations, and what is trained on of them.

    Raises:
        ArgumentError: a field is out of its range.
    """

    template: Path | None = None
    """File of the chat template; None for that in the folder of the tokenizer."""
    train_on: TrainOn = "marks"
    """Part of a list of messages that is trained on: "marks" for what the template has between `{% generation %}` and
    `{% endgeneration %}`, or "all"."""
    turn_start: str | None = None
    """Text before a turn of the assistant, in a rendered conversation, for a template without marks."""
    turn_end: str | None = None
    """Text at the end of such a turn, which is trained on too."""
    date: str | None = None
    """Date for templates that ask for today's, as YYYY-MM-DD."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template for all conversations, unless a record has its own as `chat_template_kwargs`."""

    def __post_init__(self) -> None:
        if self.train_on not in TRAIN_ON:
            raise ArgumentError(f"train_on must be one of {', '.join(TRAIN_ON)}, found {self.train_on!r}")
        if bool(self.turn_start) != bool(self.turn_end):
            raise ArgumentError(
                f"turn_start and turn_end must be given together, found {self.turn_start!r} and {self.turn_end!r}"
            )
        if self.turn_start and self.train_on == "all":
            raise ArgumentError("turn_start must be omitted with train_on 'all', found both")
        if not isinstance(self.variables, Mapping) or not all(isinstance(name, str) for name in self.variables):
            raise ArgumentError(f"the variables of a template must be a mapping of names, found {self.variables!r:.60}")
        reserved = sorted(_RESERVED & set(self.variables))
        if reserved:
            raise ArgumentError(
                f"the variables of a template must not be {', '.join(_RESERVED)}, found {reserved[0]!r}"
            )
        try:
            json.dumps(dict(self.variables), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"the variables of a template must be JSON values, found: {error}") from None


def open_rules(config: ChatConfig, tokenizer: Any) -> ChatRules:
    """Reads the chat template, and returns what decides the texts of conversations.

    Args:
        config: options.
        tokenizer: tokenizer of the texts, whose folder may have the template.

    Raises:
        ArgumentError: there is no such file, it is no template, or the tokenizer maps no special tokens.
    """
    opened_as = getattr(tokenizer, "opened_as", None)
    if opened_as is not None and not opened_as.special_tokens and maps_special_tokens(opened_as.name):
        raise ArgumentError(
            f"{opened_as.name}: the tokenizer of conversations must be opened with special_tokens=True, found False: "
            "templates write special tokens"
        )
    template = open_template(
        "" if opened_as is None else opened_as.name,
        config.template,
        date=config.date,
        tokens={**_named_tokens("" if opened_as is None else opened_as.name), **_special_tokens(tokenizer)},
        variables=dict(config.variables),
    )
    if template is not None:
        _tell_of_split_tokens(template, tokenizer)
    turn = (config.turn_start, config.turn_end) if config.turn_start and config.turn_end else None
    return ChatRules(template=template, train_on=config.train_on, turn=turn)


def _tell_of_split_tokens(template: ChatTemplate, tokenizer: Any) -> None:
    """Logs the special tokens of a template that the tokenizer takes for text."""
    names = sorted(set(_SPECIAL.findall(template.source)))
    found = [len(ids) for ids in tokenizer.tokenize_batch(names)] if names else []
    split = [(name, count) for name, count in zip(names, found, strict=True) if count > 1]
    if split:
        listed = ", ".join(f"{name} ({count} tokens)" for name, count in split[:_SHOWN])
        logger.warning(
            "%s: the tokenizer has no token for some special tokens of the template: %s; train one with "
            "--special-token for each, or use that of the model",
            template.name,
            listed + (f" and {len(split) - _SHOWN} more" if len(split) > _SHOWN else ""),
        )


def _named_tokens(name: str) -> dict[str, str]:
    """Returns the special tokens that the folder of a tokenizer names beyond those with a role, by their names."""
    try:
        stated = json.loads((Path(name) / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = [stated.get(key) for key in ("extra_special_tokens", "model_specific_special_tokens")]
    except (OSError, ValueError, AttributeError):
        return {}
    found = {key: token for one in named if isinstance(one, dict) for key, token in one.items()}
    contents = {key: token.get("content") if isinstance(token, dict) else token for key, token in found.items()}
    return {key: token for key, token in contents.items() if isinstance(token, str)}


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    """Returns the special tokens of a tokenizer by the names that templates have for them."""
    found = {}
    for role in _ROLES:
        try:
            index = tokenizer.unknown_id if role == "unk" else getattr(tokenizer, role)
        except (AttributeError, NotImplementedError):
            continue
        token = None if index is None else tokenizer.inv_vocab.get(index)
        if token is not None:
            found[f"{role}_token"] = token
    return found
