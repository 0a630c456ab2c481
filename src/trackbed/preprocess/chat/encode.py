"""Conversations as token ids with the runs of tokens that are trained on.

Shapes: D documents, R runs of trained tokens, T tokens of all documents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.preprocess.chat.conversation import (
    Completion,
    Conversation,
    Messages,
    TokenIds,
    WholeText,
)
from trackbed.preprocess.chat.template import ChatTemplate, Variables
from trackbed.preprocess.chat.trained_spans import Numbers, TokenRanges
from trackbed.preprocess.record_error import RecordError
from trackbed.tokens.trained_tokens import runs_of

TrainOn = Literal["marks", "all"]
Encode = Callable[[list[str]], tuple[npt.NDArray[Any], Numbers]]


class MarkedDocuments(NamedTuple):
    """Documents with the tokens that are trained on."""

    tokens: npt.NDArray[Any]
    """`[T]` tokens of all documents."""
    lengths: Numbers
    """`[D]` tokens of each."""
    counts: Numbers
    """`[D]` runs of trained tokens of each."""
    runs: Numbers
    """`[R, 2]` first token of each run in its document, and number of tokens."""
    records: Numbers
    """`[D]` number of the record of each, in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRules:
    """Rules that decide the texts of conversations and their trained parts; picklable."""

    template: ChatTemplate | None
    """Chat template; None if messages are an error."""
    train_on: TrainOn = "marks"
    """Part of a list of messages that is trained on: that which the template marks, or all of it."""
    turn: tuple[str, str] | None = None
    """Texts around a turn of the assistant in a rendered conversation; the second one is trained on. They take the
    place of the marks."""

    def parts(self, found: Messages | Completion | WholeText) -> list[str]:
        """Returns the text of a conversation in parts, of which every second one is trained on.

        Raises:
            RecordError: it cannot be rendered.
        """
        if isinstance(found, WholeText):
            return ["", found.text]
        if isinstance(found, Completion):
            return self._completion(found)
        variables = Variables(found.tools, found.variables)
        parts = self._render(found.messages, variables)
        if self.train_on == "all":
            return ["", "".join(parts)]
        if self.turn is None and self.template is not None and not self.template.marks(variables):
            raise ArgumentError(
                f"{self.template.name}: a chat template must mark what is trained on with {{% generation %}} and "
                "{% endgeneration %}, found no marks: add them, or state the texts around a turn (--turn-start, "
                "--turn-end), or train on everything (--train-on all)"
            )
        return parts if self.turn is None else _between("".join(parts), *self.turn)

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the output, as JSON values."""
        one = self.template
        template = (
            None if one is None else [one.source, one.with_tools, dict(one.tokens), dict(one.variables), one.date]
        )
        return {"template": template, "train_on": self.train_on, "turn": None if self.turn is None else list(self.turn)}

    def _completion(self, found: Completion) -> list[str]:
        """Returns the texts of a prompt and of its completion."""
        if isinstance(found.prompt, str):
            return [found.prompt, found.completion]
        prompt = "".join(self._render(found.prompt, Variables(found.tools, found.variables, prompts=True)))
        whole = "".join(self._render([*found.prompt, *found.completion], Variables(found.tools, found.variables)))
        if not whole.startswith(prompt):
            raise RecordError(
                "the prompt, as the chat template renders it, must be the beginning of the whole conversation, "
                f"found {whole[: len(prompt)][-40:]!r} in the place of {prompt[-40:]!r}"
            )
        return [prompt, whole[len(prompt) :]]

    def _render(self, messages: list[dict[str, Any]], variables: Variables) -> list[str]:
        if self.template is None:
            raise RecordError(
                "a conversation must have a chat template, found none in the folder of the tokenizer: "
                "--chat-template FILE states one"
            )
        return self.template.render(messages, variables)


class ChatEncoder:
    """Makes documents of conversations, on one core.

    Args:
        rules: what decides the texts and what is trained on.
        tokenizer: tokenizer of the texts.
        dtype: dtype of the tokens in the file.
    """

    def __init__(self, rules: ChatRules, tokenizer: Any, dtype: np.dtype[Any]) -> None:
        self._rules = rules
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._vocab_size = int(tokenizer.vocab_size)

    @cached_property
    def _ranges(self) -> TokenRanges:
        return TokenRanges(self._tokenizer)

    @cached_property
    def _eod(self) -> int | None:
        try:
            return int(self._tokenizer.eod)
        except (ArgumentError, AttributeError, NotImplementedError):
            return None  # the tokenizer has none

    def prepare(self, found: Conversation) -> "TokenIds | list[str]":
        """Returns the text of a conversation in parts, or its documents if it is tokenised already.

        Raises:
            RecordError: it cannot be rendered, or its ids are none of the tokenizer.
        """
        if not isinstance(found, TokenIds):
            parts = self._rules.parts(found)
            for part in parts:
                if not part.isascii():
                    _check_text(part)
            return parts
        for ids, _ in found.documents:
            wrong = ids[(ids < 0) | (ids >= self._vocab_size)]
            if len(wrong):
                raise RecordError(f"input_ids must be in [0, {self._vocab_size}), found {wrong[0]}")
        return without_padding(found, self._eod) if found.most_padding and self._eod is not None else found

    def encode(self, batch: Sequence["TokenIds | list[str]"], encode: Encode) -> MarkedDocuments:
        """Returns the documents of prepared conversations, in their order.

        Args:
            batch: what `prepare` returned.
            encode: returns the `[T]` ids of texts, and the `[D]` number of each.
        """
        found = []
        numbered = enumerate(batch)
        for is_text, group in groupby(numbered, lambda one: isinstance(one[1], list)):
            members = list(group)
            found.append(self._texts(members, encode) if is_text else self._of_ids(members))
        return _concatenate(found, self._dtype)

    def _texts(self, members: Sequence[tuple[int, Any]], encode: Encode) -> MarkedDocuments:
        ids, lengths = encode(["".join(parts) for _, parts in members])
        runs = self._ranges.trained_runs([parts for _, parts in members], ids, lengths)
        return MarkedDocuments(ids, lengths, *runs, np.array([number for number, _ in members], dtype=np.int64))

    def _of_ids(self, members: Sequence[tuple[int, Any]]) -> MarkedDocuments:
        numbered = [(number, ids, mask) for number, one in members for ids, mask in one.documents]
        runs = [runs_of(mask) for _, _, mask in numbered]
        return MarkedDocuments(
            np.concatenate([ids for _, ids, _ in numbered]).astype(self._dtype),
            np.array([len(ids) for _, ids, _ in numbered], dtype=np.int64),
            np.array(list(map(len, runs)), dtype=np.int64),
            np.concatenate(runs).astype(np.int64),
            np.array([number for number, _, _ in numbered], dtype=np.int64),
        )


def without_padding(found: TokenIds, pad: int) -> TokenIds:
    """Returns documents without the untrained ids `pad` at their ends, up to as many as may be padding.

    >>> ids, trained = np.array([5, 6, 2, 2, 2]), np.array([False, True, True, False, False])
    >>> without_padding(TokenIds(((ids, trained),), most_padding=3), pad=2).documents[0][0].tolist()
    [5, 6, 2]
    """
    documents = []
    for ids, trained in found.documents:
        most = min(found.most_padding, len(ids) - 1)
        is_kept = ((ids != pad) | trained)[len(ids) - most :]
        kept = len(ids) - most + (int(is_kept.nonzero()[0][-1]) + 1 if is_kept.any() else 0)
        documents.append((ids[:kept], trained[:kept]))
    return TokenIds(tuple(documents))


def num_labels(found: MarkedDocuments) -> Numbers:
    """Returns `[D]` trained tokens of each document, without its first token, which is never a label."""
    trained = np.where(found.runs[:, 0] == 0, found.runs[:, 1] - 1, found.runs[:, 1])
    documents = np.repeat(np.arange(len(found.counts)), found.counts)
    return np.bincount(documents, weights=trained, minlength=len(found.counts)).astype(np.int64)


def select(found: MarkedDocuments, kept: npt.NDArray[np.bool_]) -> MarkedDocuments:
    """Returns the documents that are marked.

    Args:
        found: D documents.
        kept: `[D]` True for each that stays.
    """
    if kept.all():
        return found
    return MarkedDocuments(
        found.tokens[np.repeat(kept, found.lengths)],
        found.lengths[kept],
        found.counts[kept],
        found.runs[np.repeat(kept, found.counts)],
        found.records[kept],
    )


def is_trained_to_end(found: MarkedDocuments) -> npt.NDArray[np.bool_]:
    """Returns `[D]` True for each document whose last token is trained."""
    documents = np.repeat(np.arange(len(found.counts)), found.counts)
    at_end = np.zeros(len(found.counts), dtype=np.bool_)
    at_end[documents[found.runs.sum(axis=1) == found.lengths[documents]]] = True
    return at_end


def _concatenate(parts: Sequence[MarkedDocuments], dtype: np.dtype[Any]) -> MarkedDocuments:
    nothing = np.empty(0, dtype=np.int64)
    return MarkedDocuments(
        np.concatenate([np.empty(0, dtype=dtype), *(one.tokens for one in parts)]),
        np.concatenate([nothing, *(one.lengths for one in parts)]),
        np.concatenate([nothing, *(one.counts for one in parts)]),
        np.concatenate([np.empty((0, 2), dtype=np.int64), *(one.runs for one in parts)]),
        np.concatenate([nothing, *(one.records for one in parts)]),
    )


def _between(text: str, begin: str, end: str) -> list[str]:
    """Splits a text into what stands between two texts, the second one included, and what does not."""
    parts, at = [""], 0
    while (found := text.find(begin, at)) >= 0:
        start = found + len(begin)
        stop = text.find(end, start)
        following = text.find(begin, start)
        if stop < 0 <= following or 0 <= following < stop:
            raise RecordError(
                f"a turn must end in {end!r} (--turn-end) before the next one begins with {begin!r}, found "
                f"{text[start:following][-40:]!r} before that"
            )
        stop = len(text) if stop < 0 else stop + len(end)
        parts[-1] += text[at:start]
        parts += [text[start:stop], ""]
        at = stop
    parts[-1] += text[at:]
    return parts


def _check_text(part: str) -> None:
    try:
        part.encode()
    except UnicodeEncodeError as error:
        raise RecordError(
            f"a conversation must be text, found half of a surrogate pair, U+{ord(part[error.start]):X}"
        ) from None
