"""Options of conversations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trackbed.datasets.tokenizers.kinds import maps_special_tokens
from trackbed.errors import ArgumentError
from trackbed.preprocess.chat.encode import ChatRules, TrainOn
from trackbed.preprocess.chat.template import open_template

CHAT_KEY: Final = "chat"
"""Key in the names of the pairs of conversations."""
TRAIN_ON: Final[tuple[TrainOn, ...]] = ("marks", "all")
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
        tokens=_special_tokens(tokenizer),
        variables=dict(config.variables),
    )
    turn = (config.turn_start, config.turn_end) if config.turn_start and config.turn_end else None
    return ChatRules(template=template, train_on=config.train_on, turn=turn)


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
