"""Records become conversations, or say what is wrong with them."""

import pytest

from trackbed.preprocess.chat.conversation import (
    Completion,
    Messages,
    TokenIds,
    WholeText,
    parse_conversation,
    without_nulls,
)
from trackbed.preprocess.record_error import RecordError

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def test_messages_have_roles_and_contents_by_either_name():
    assert parse_conversation({"messages": [USER, ASSISTANT], "text": "x"}) == Messages([USER, ASSISTANT])
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert parse_conversation({"conversations": shared}) == Messages([USER, ASSISTANT])
    assert parse_conversation({"conversation": [USER]}) == Messages([USER])
    assert parse_conversation({"messages": '[{"role": "user", "content": "a"}]'}) == Messages([USER])


def test_tools_and_variables_may_be_json_in_a_string():
    found = parse_conversation(
        {"messages": [USER], "tools": '[{"name": "f"}]', "chat_template_kwargs": '{"enable_thinking": false}'}
    )
    assert (found.tools, found.variables) == ([{"name": "f"}], {"enable_thinking": False})
    assert parse_conversation({"messages": [USER], "tools": ['{"name": "f"}']}).tools == [{"name": "f"}]
    assert parse_conversation({"messages": [USER], "tools": []}).tools is None


def test_what_a_model_thought_has_the_names_that_templates_read():
    (message,) = parse_conversation({"messages": [{**ASSISTANT, "reasoning": "hm"}]}).messages
    assert (message["thinking"], message["reasoning_content"]) == ("hm", "hm")


def test_prompts_and_texts():
    assert parse_conversation({"prompt": "a", "completion": "b"}) == Completion("a", "b")
    assert parse_conversation({"prompt": [USER], "completion": [ASSISTANT]}) == Completion([USER], [ASSISTANT])
    assert parse_conversation({"messages": None, "text": "x"}) == WholeText("x")


@pytest.mark.parametrize(
    ("fields", "mask"),
    [
        ({}, [1, 1, 1]),
        ({"loss_mask": [0, 1, 0]}, [0, 1, 0]),
        ({"loss_mask": [0.0, 1.0, 0.0]}, [0, 1, 0]),
        ({"assistant_masks": [0, 0, 1]}, [0, 0, 1]),
        ({"labels": [-100, 8, -100]}, [0, 1, 0]),
    ],
)
def test_ids_have_masks_in_several_forms(fields, mask):
    found = parse_conversation({"input_ids": [7, 8, 9], **fields})
    assert isinstance(found, TokenIds)
    ((ids, trained),) = found.documents
    assert (ids.tolist(), trained.tolist()) == ([7, 8, 9], mask)


def test_a_pack_of_bridge_is_its_documents_with_masks_moved_to_the_tokens():
    found = parse_conversation(
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 1, 1, 0], "seq_start_id": [0, 3]}
    ).documents
    assert [(ids.tolist(), mask.tolist()) for ids, mask in found] == [
        ([1, 2, 3], [False, False, True]),
        ([4, 5], [False, True]),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "found no key"),
        ({"id": 1}, "found 'id'"),
        ({"messages": []}, "array of messages, found an empty array"),
        ({"messages": "no json"}, "'messages' must be an array, or one as JSON"),
        ({"messages": ["a"]}, r"messages\[0\] must be an object, found a string"),
        (
            {"conversations": [{"from": "gpt", "text": "a"}]},
            r"conversations\[0\] must have the key 'value', found 'from'",
        ),
        ({"messages": [{"role": "assistant", "value": "a"}]}, r"messages\[0\] must have a content or tool_calls"),
        ({"messages": "[" * 5000}, "'messages' must be an array, or one as JSON"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\] must have the key 'role'"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "'from' must be one of human"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "found a string and an array"),
        ({"messages": [USER], "tools": {}}, "'tools' must be an array, found an object"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "must be an object, found an array"),
        ({"text": 1}, "'text' must be a string"),
        ({"input_ids": [1, "2"]}, "must be an array of integers, found an array with a string"),
        ({"input_ids": [1, True]}, "found an array with a boolean"),
        ({"input_ids": [2**70]}, "64-bit"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "as many values as 'input_ids', 2, found 1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "an array of 0 and 1"),
        (
            {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
            r"labels\[0\] must be input_ids\[0\] = 1, as labels are not",
        ),
        ({"input_ids": [1, 2], "seq_start_id": [1]}, "seq_start_id must rise from 0"),
        ({"input_ids": [1, 2], "seq_start_id": [0, 2]}, "to below 2"),
    ],
)
def test_what_is_no_conversation_says_so(fields, message):
    with pytest.raises(RecordError, match=message):
        parse_conversation(fields)


def test_what_the_system_says_beside_the_turns_comes_first():
    shared = {"system": "Be brief.", "conversations": [{"from": "human", "value": "a"}]}
    assert parse_conversation(shared).messages == [{"role": "system", "content": "Be brief."}, USER]
    spoken = {"system": "x", "messages": [{"role": "system", "content": "y"}, USER]}
    assert parse_conversation(spoken).messages == spoken["messages"]


def test_a_message_that_is_not_to_be_trained_is_refused():
    with pytest.raises(RecordError, match=r"messages\[1\] must be trained as the template says, found the weight 0"):
        parse_conversation({"messages": [USER, {**ASSISTANT, "weight": 0}]})
    with pytest.raises(
        RecordError, match=r"conversations\[0\] must be trained as the template says, found the weight 0"
    ):
        parse_conversation({"conversations": [{"from": "gpt", "value": "b", "weight": 0}]})
    assert parse_conversation({"messages": [{**ASSISTANT, "weight": 1}]}).messages[0]["content"] == "b"


def test_nulls_that_a_table_adds_are_left_out():
    row = {
        "messages": [{**USER, "tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [{"a": None}]}]
    }
    assert without_nulls(row) == {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}]}
