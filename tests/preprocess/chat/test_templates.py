"""Ids and masks of conversations are those of `apply_chat_template` of transformers, for templates with marks."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from transformers import PreTrainedTokenizerFast

from tests.support import chat
from tests.support.tiers import slow_but
from trackbed.errors import ArgumentError
from trackbed.preprocess import open_fastest_tokenizer
from trackbed.preprocess.chat.conversation import parse_conversation
from trackbed.preprocess.chat.encode import ChatEncoder, ChatRules
from trackbed.preprocess.chat.template import open_template
from trackbed.preprocess.record_error import RecordError

FAMILIES = sorted(chat.templates())
TODAY = "2026-01-31"
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
FAST = {"qwen3_training", "llama3_training", "gptoss_training", "nemotron_3_nano_training", "gemma_training"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        prefix: str(chat.write_tokenizer(folder / f"{prefix}.json", prefix_space=prefix)) for prefix in (False, True)
    }


@pytest.fixture(scope="module")
def ours(paths):
    return {prefix: open_fastest_tokenizer(path, special_tokens=True) for prefix, path in paths.items()}


def encode(tokenizer, template, conversations, **rules):
    """Ids and mask of each conversation, as the encoder makes them of a batch."""
    encoder = ChatEncoder(ChatRules(template=template, **rules), tokenizer, np.dtype(np.uint16))

    def ids_of(texts):
        found = tokenizer.tokenize_batch(texts)
        return np.concatenate([np.array(one, dtype=np.uint16) for one in found]), np.array([len(one) for one in found])

    prepared = [encoder.prepare(parse_conversation(one)) for one in conversations]
    found = encoder.encode(prepared, ids_of)
    ids = np.split(found.tokens, np.cumsum(found.lengths)[:-1])
    masks = [np.zeros(length, dtype=int) for length in found.lengths]
    for document, (first, count) in zip(np.repeat(np.arange(len(masks)), found.counts), found.runs, strict=True):
        masks[document][first : first + count] = 1
    return [(one.tolist(), mask.tolist()) for one, mask in zip(ids, masks, strict=True)]


def with_whole_characters(library, text, mask):
    """The mask of transformers, with all tokens of a character where it has the first one.

    A span that ends in a character of several tokens has only the first of them there.
    """
    offsets = library.encode(text, add_special_tokens=False).offsets
    found = list(mask)
    for place in range(1, len(found)):
        if found[place - 1] and offsets[place] == offsets[place - 1]:
            found[place] = 1
    return found


def known_bug(library, text, spans):
    """True if a span is empty, or begins or ends with a character that no token has (transformers#47325, #34494)."""
    found = library.encode(text, add_special_tokens=False)
    return any(
        start == stop or found.char_to_token(start) is None or not found.char_to_token(stop - 1)
        for start, stop in spans
    )


def compare(reference, tokenizer, file, conversation):
    """Compares one conversation, unless both refuse it or transformers has one of its known bugs."""
    from transformers.utils.chat_template_utils import render_jinja_template

    library = reference.backend_tokenizer
    try:
        wanted = reference.apply_chat_template(
            conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        given = {**reference.special_tokens_map, "chat_template": file.read_text("utf-8")}
        texts, spans = render_jinja_template([conversation], return_assistant_tokens_mask=True, **given)
    except Exception:
        with pytest.raises(RecordError):
            encode(tokenizer, template_of(file), [{"messages": conversation}])
        return
    ((ids, mask),) = encode(tokenizer, template_of(file), [{"messages": conversation}])
    if "strftime_now" not in given["chat_template"]:
        assert ids == wanted["input_ids"]
    if ids == wanted["input_ids"] and not known_bug(library, texts[0], spans[0]):
        assert mask == with_whole_characters(library, texts[0], wanted["assistant_masks"])


def template_of(file):
    return open_template("", file, date=TODAY, tokens=SPECIAL)


@pytest.mark.parametrize("family", slow_but(sorted(FAST), FAMILIES))
def test_ids_and_masks_are_those_of_transformers(family, ours, paths):
    file = chat.templates()[family]
    references = {
        prefix: PreTrainedTokenizerFast(
            tokenizer_file=path, bos_token="<bos>", eos_token="<eos>", chat_template=file.read_text("utf-8")
        )
        for prefix, path in paths.items()
    }

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(conversation=chat.conversations())
    def check(conversation):
        for prefix in (False, True):
            compare(references[prefix], ours[prefix], file, conversation)

    check()


def test_at_least_ten_families_have_marks():
    assert len({name.split("_")[0] for name in FAMILIES}) >= 10


@pytest.mark.parametrize("prefix", [False, True])
def test_an_empty_turn_marks_nothing_where_transformers_fails_or_marks_what_follows(ours, prefix, tmp_path):
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    (tmp_path / "t.jinja").write_text(source)
    messages = [{"role": "user", "content": ""}, {"role": "user", "content": "the cat"}]
    ((ids, mask),) = encode(ours[prefix], template_of(tmp_path / "t.jinja"), [{"messages": messages}])
    assert mask[0] == 0
    assert [token for token, one in zip(ids, mask, strict=True) if one] == ids[1:-1]


def test_a_character_of_several_tokens_is_trained_as_a_whole(ours, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}x"
    )
    ((ids, mask),) = encode(
        ours[False], template_of(tmp_path / "t.jinja"), [{"messages": [{"role": "a", "content": "😀"}]}]
    )
    assert mask == [1] * (len(ids) - 1) + [0]


def test_a_batch_has_the_masks_of_its_conversations_one_by_one(ours, tmp_path):
    (tmp_path / "t.jinja").write_text(chat.MARKED)
    template = template_of(tmp_path / "t.jinja")
    batch = [
        {"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat 😀"}]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]},
        {"prompt": "1+1=", "completion": "2"},
        {"text": "e\u0301 alone"},  # not in normal form C
        {"messages": [{"role": "assistant", "content": ""}]},
    ]
    for tokenizer in ours.values():
        assert encode(tokenizer, template, batch) == [encode(tokenizer, template, [one])[0] for one in batch]


def test_a_template_without_marks_is_an_error_that_names_it(ours, tmp_path):
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    conversation = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(ArgumentError, match=r"plain\.jinja: a chat template must mark"):
        encode(ours[False], template_of(file), [conversation])
    ((ids, mask),) = encode(ours[False], template_of(file), [conversation], train_on="all")
    assert mask == [1] * len(ids)
    ((ids, mask),) = encode(
        ours[False], template_of(file), [conversation], turn=("<|im_end|><|im_start|>", "<|im_end|>")
    )
    assert mask == [0, 0, 0, 0, 1, 1]
    ((_, mask),) = encode(ours[False], template_of(file), [{"prompt": "a<|im_end|>", "completion": "b"}])
    assert mask == [0, 0, 1]


def test_a_prompt_must_be_the_beginning_of_what_the_template_makes_of_the_whole(ours, tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text(chat.MARKED)
    record = {
        "prompt": [{"role": "user", "content": "a"}],
        "completion": [{"role": "assistant", "content": "b"}],
    }
    ((ids, mask),) = encode(ours[False], template_of(file), [record])
    start = ids.index(ours[False].tokenize("b")[0])
    assert mask == [0] * start + [1] * (len(ids) - start)
    file.write_text("{{ messages | length }}")
    with pytest.raises(RecordError, match="must be the beginning"):
        encode(ours[False], template_of(file), [record])


def test_a_template_that_asks_for_the_date_is_given_one_or_is_an_error(ours, tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{% generation %}{{ strftime_now('%d %b %Y') }}{% endgeneration %}")
    record = {"messages": [{"role": "user", "content": "a"}]}
    ((ids, _),) = encode(ours[False], template_of(file), [record])
    assert ours[False].detokenize(np.array(ids)) == "31 Jan 2026"
    with pytest.raises(ArgumentError, match="asks for today's date"):
        encode(ours[False], open_template("", file, date=None), [record])
    with pytest.raises(ArgumentError, match="must be as 2026-01-31"):
        open_template("", file, date="tomorrow")


def test_a_conversation_cannot_write_marks(ours, tmp_path):
    (tmp_path / "t.jinja").write_text(chat.MARKED)
    content = "{% generation %}\ufdd0<x\ufdd0>{{ 7 * 7 }}"
    ((ids, mask),) = encode(
        ours[False], template_of(tmp_path / "t.jinja"), [{"messages": [{"role": "user", "content": content}]}]
    )
    assert content in ours[False].detokenize(np.array(ids))
    assert not any(mask)


def test_a_template_of_a_folder_is_found(ours, tmp_path):
    assert open_template(str(tmp_path), None, date=None) is None
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}'
    )
    found = open_template(str(tmp_path), None, date=None)
    record = {"messages": [{"role": "user", "content": "a"}]}
    assert [found.render(record["messages"], given) for given in variables()] == [["d"], ["t"]]
    (tmp_path / "chat_template.jinja").write_text("j")
    assert open_template(str(tmp_path), None, date=None).source == "j"
    (tmp_path / "chat_template.jinja").write_text("{% if")
    with pytest.raises(ArgumentError, match="must be a Jinja template"):
        open_template(str(tmp_path), None, date=None)


def variables():
    from trackbed.preprocess.chat.template import Variables

    return Variables(), Variables([{"name": "f"}])


def test_marks_inside_of_a_macro_are_where_they_stand(ours, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% macro turn(text) %}<bos>{% generation %}{{ text }}<eos>{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ turn(m.content) }}{% endfor %}"
    )
    record = {"messages": [{"role": "assistant", "content": "a"}] * 2}
    ((_, mask),) = encode(ours[False], template_of(tmp_path / "t.jinja"), [record])
    assert mask == [0, 1, 1] * 2


MACRO = "{% macro f(t) %}{% generation %}{{ t }}{% endgeneration %}{% endmacro %}"
CAPTURED = {
    "trim": "{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}{{ x | trim }}",
    "upper": MACRO + "{{ f(m.content) | upper }}",
    "cut": "{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}{{ x[:3] }}",
    "if": MACRO + "{% if f('') %}y{% else %}n{% endif %}",
    "filter": "{% filter upper %}{% generation %}{{ m.content }}{% endgeneration %}{% endfilter %}",
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_template_that_looks_at_its_marks_is_refused(ours, tmp_path, name):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}" + CAPTURED[name] + "{% endfor %}")
    record = {"messages": [{"role": "assistant", "content": "  answer  "}]}
    with pytest.raises(RecordError, match=r"must not look at what stands in|must write what stands in"):
        encode(ours[False], template_of(tmp_path / "t.jinja"), [record])


def test_a_captured_block_that_is_written_as_it_is_is_trained(ours, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}<bos>{{ x }}"
        "{% endfor %}"
    )
    record = {"messages": [{"role": "assistant", "content": "a"}]}
    ((_, mask),) = encode(ours[False], template_of(tmp_path / "t.jinja"), [record])
    assert mask == [0, 1]


def test_a_turn_without_its_end_is_refused(ours, tmp_path):
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    template = template_of(tmp_path / "t.jinja")
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(RecordError, match=r"a turn must end in '<eos>' \(--turn-end\) before the next one begins"):
        encode(ours[False], template, [{"messages": messages}], turn=("<|im_start|>", "<eos>"))
    ((_, mask),) = encode(ours[False], template, [{"messages": messages[:1]}], turn=("<|im_start|>", "<eos>"))
    assert mask == [0, 1, 1]


def test_a_folder_may_have_a_template_for_tools_in_a_file(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    (tmp_path / "chat_template.jinja").write_text("d")
    found = open_template(str(tmp_path), None, date=None)
    messages = [{"role": "user", "content": "a"}]
    assert [found.render(messages, given) for given in variables()] == [["d"], ["t"]]


@pytest.mark.parametrize("text", ["{{ lipsum() }}", "{{ [1, 2] | random }}"])
def test_what_differs_from_run_to_run_is_not_there(ours, tmp_path, text):
    (tmp_path / "t.jinja").write_text(text)
    with pytest.raises((RecordError, ArgumentError)):
        encode(ours[False], template_of(tmp_path / "t.jinja"), [{"messages": [{"role": "user", "content": "a"}]}])
