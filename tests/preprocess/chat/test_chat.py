"""Conversations of files become pairs with masks: however they are stored, cut into chunks and shards, and resumed."""

import gzip
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import chat
from trackbed.errors import ArgumentError, FormatError, PlanError
from trackbed.preprocess import ChatConfig, PreprocessConfig, open_tokenizer, preprocess
from trackbed.tokens import IndexedDataset, merge, verify_content
from trackbed.tokens.document_sources import DocumentSources
from trackbed.tokens.shard_list import read_all_shards
from trackbed.tokens.trained_tokens import TrainedTokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations as JSON lines, packed and not, and as Parquet; a tokenizer, and a template."""
    made = tmp_path_factory.mktemp("chat")
    draw = random.Random(3)
    records = [record(draw, number) for number in range(400)]
    lines = ["" if draw.random() < 0.02 else json.dumps(one, ensure_ascii=False) for one in records]
    (made / "a.jsonl").write_text("\n".join(lines[:200]) + "\n")
    (made / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[200:300]).encode()))
    rows = [one["messages"] for one in records if "messages" in one][:100]
    pq.write_table(pa.table({"id": list(range(len(rows))), "messages": rows}), made / "c.parquet", row_group_size=33)
    (made / "d.txt").write_text("a whole text")
    chat.write_tokenizer(made / "tokenizer.json")
    (made / "t.jinja").write_text(chat.MARKED)
    return made


def record(draw, number):
    """A conversation of any form, a third of which have no trained token."""
    texts = [f"{number} " + draw.choice(["the cat", "é😀", "", "東京\n\n", "x" * 40]) for _ in range(4)]
    roles = draw.choice([("user", "assistant", "user", "assistant"), ("system", "user"), ("user", "assistant")])
    if draw.random() < 0.1:
        return {"prompt": texts[0], "completion": texts[1]}
    if draw.random() < 0.1:
        ids = [draw.randrange(1000) for _ in range(draw.randrange(1, 30))]
        return {"input_ids": ids, "loss_mask": [int(draw.random() < 0.4) for _ in ids]}
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def options(folder, out, **changed):
    inputs = tuple(folder / name for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.txt"))
    given = {
        "inputs": inputs,
        "output": str(out),
        "chat": ChatConfig(template=folder / "t.jinja"),
        "keep_sources": True,
        "workers": 1,
        **changed,
    }
    return PreprocessConfig(**given)


def tokenizer_of(folder):
    return open_tokenizer(folder / "tokenizer.json", special_tokens=True)


def documents_of(*prefixes):
    """Ids, mask and source of each document."""
    found = []
    for prefix in prefixes:
        verify_content(prefix)
        pair, trained, sources = IndexedDataset(prefix), TrainedTokens.open(prefix), DocumentSources.open(prefix)
        for number in range(len(pair)):
            ids = pair[number]
            mask = trained.of(number, len(ids))
            assert mask[1:].any()
            found.append((ids.tolist(), mask.tolist(), sources.of(number)))
    return found


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    report = preprocess(options(folder, out), tokenizer_of(folder))
    return report, documents_of(f"{out}_chat_document")


def test_documents_are_the_conversations_with_a_trained_token(folder, whole):
    report, found = whole
    (output,) = report.outputs
    assert (output.documents, output.tokens) == (len(found), sum(len(ids) for ids, _, _ in found))
    assert output.trained == sum(sum(mask) for _, mask, _ in found)
    assert output.documents + output.untrained + output.dropped == report.records
    assert output.untrained > 50
    tokenizer = tokenizer_of(folder)
    lines = (folder / "a.jsonl").read_bytes()
    for ids, mask, source in found:
        if source.name != str(folder / "a.jsonl"):
            continue
        wanted = json.loads(lines[source.place :].partition(b"\n")[0])
        trained = tokenizer.detokenize(np.array(ids)[np.array(mask)])
        if "messages" in wanted:
            said = [one["content"] for one in wanted["messages"] if one["role"] == "assistant"]
            assert trained == "".join(f"{text}<|im_end|>" for text in said)
        elif "prompt" in wanted:
            assert trained.endswith(wanted["completion"])
        else:
            assert (ids, mask) == (wanted["input_ids"], list(map(bool, wanted["loss_mask"])))


@pytest.mark.parametrize("changed", [{"workers": 2, "chunk_bytes": 2000}, {"chunk_bytes": 300}])
def test_workers_and_chunks_change_nothing(folder, whole, tmp_path, changed):
    report = preprocess(options(folder, tmp_path / "out", **changed), tokenizer_of(folder))
    assert report.outputs[0].trained == whole[0].outputs[0].trained
    assert documents_of(tmp_path / "out_chat_document") == whole[1]


def test_shards_have_the_same_documents_and_counts(folder, whole, tmp_path):
    config = options(folder, tmp_path / "out", shard_bytes=4000)
    report = preprocess(config, tokenizer_of(folder))
    shards = read_all_shards(tmp_path / "out.toml")
    assert len(shards) > 3
    assert documents_of(*shards) == whole[1]
    counted = [(one.documents, one.tokens, one.trained, one.untrained, one.open_turns) for one in report.outputs]
    once = [(one.documents, one.tokens, one.trained, one.untrained, one.open_turns) for one in whole[0].outputs]
    assert counted == once
    assert preprocess(config, tokenizer_of(folder)).finished_shards == report.shards
    merge(shards, f"{tmp_path}/merged")
    assert documents_of(f"{tmp_path}/merged") == whole[1]
    (folder / "other.jinja").write_text(chat.MARKED + " ")
    with pytest.raises(ArgumentError, match="made in the same way"):
        preprocess(
            options(folder, tmp_path / "out", shard_bytes=4000, chat=ChatConfig(template=folder / "other.jinja")),
            tokenizer_of(folder),
        )


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_interrupted_goes_on(folder, whole, tmp_path, seed):
    draw = random.Random(seed)
    config = options(folder, tmp_path / "out", chunk_bytes=700, save_interval_bytes=1500)
    for _ in range(4):
        stop = draw.uniform(0.2, 0.9)

        def interrupt(done, total, stop=stop):
            if done > stop * total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            preprocess(config, tokenizer_of(folder), progress=interrupt)
    report = preprocess(config, tokenizer_of(folder))
    assert report.kept_bytes > 0
    assert documents_of(tmp_path / "out_chat_document") == whole[1]
    counted = report.outputs[0]
    assert (counted.trained, counted.untrained) == (whole[0].outputs[0].trained, whole[0].outputs[0].untrained)


def test_the_end_of_a_document_is_trained_like_the_token_before_it(folder, tmp_path):
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "a<|im_end|>", "completion": "b"}\n{"messages": [{"role": "assistant", "content": "c"}]}\n'
    )
    config = options(folder, tmp_path / "out", inputs=(tmp_path / "in.jsonl",), append_eod=True)
    tokenizer = tokenizer_of(folder)
    report = preprocess(config, tokenizer)
    (first, second) = documents_of(tmp_path / "out_chat_document")
    assert first[0][-1] == second[0][-1] == tokenizer.eod
    assert (first[1][-1], second[1][-1]) == (True, False)
    assert report.outputs[0].open_turns == 0
    report = preprocess(options(folder, tmp_path / "out", inputs=(tmp_path / "in.jsonl",)), tokenizer)
    assert report.outputs[0].open_turns == 1  # the completion


def test_turns_that_end_before_their_stop_token_are_counted(folder, tmp_path):
    (tmp_path / "t.jinja").write_text(
        chat.MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    )
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "assistant", "content": "c"}]}\n' * 3)
    config = options(
        folder, tmp_path / "out", inputs=(tmp_path / "in.jsonl",), chat=ChatConfig(template=tmp_path / "t.jinja")
    )
    assert preprocess(config, tokenizer_of(folder)).outputs[0].open_turns == 3


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_a_line_end_behind_the_stop_token_does_not_matter(folder, tmp_path, end):
    turn = "<|im_start|>{% generation %}{{ m.content }}<|im_end|>" + end + "{% endgeneration %}"
    (tmp_path / "t.jinja").write_text("{% for m in messages %}" + turn + "{% endfor %}")
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "assistant", "content": "c d"}]}\n' * 3)
    config = options(
        folder, tmp_path / "out", inputs=(tmp_path / "in.jsonl",), chat=ChatConfig(template=tmp_path / "t.jinja")
    )
    assert preprocess(config, tokenizer_of(folder)).outputs[0].open_turns == 0


def test_special_tokens_of_a_template_that_the_tokenizer_lacks_are_told(folder, tmp_path, caplog):
    (tmp_path / "t.jinja").write_text(chat.MARKED.replace("im_start", "other_start"))
    chosen = ChatConfig(template=tmp_path / "t.jinja")
    preprocess(options(folder, tmp_path / "out", chat=chosen), tokenizer_of(folder))
    assert "no token for some special tokens of the template: <|other_start|> (" in caplog.text
    assert "im_end" not in caplog.text


def test_bad_conversations_are_located_and_skipped(folder, tmp_path):
    good = '{"messages": [{"role": "assistant", "content": "c"}]}\n'
    half = '{"messages": [{"role": "assistant", "content": "\\ud800"}]}\n'
    bad = '{"messages": 3}\n{"input_ids": [100000], "text": "x"}\n' + half
    (tmp_path / "in.jsonl").write_text(good + bad + good)
    config = options(folder, tmp_path / "out", inputs=(tmp_path / "in.jsonl",))
    with pytest.raises(FormatError, match=r"in\.jsonl:2: the value of 'messages' must be an array"):
        preprocess(config, tokenizer_of(folder))
    report = preprocess(
        options(folder, tmp_path / "out", inputs=(tmp_path / "in.jsonl",), skip_bad=True), tokenizer_of(folder)
    )
    assert (report.bad, report.outputs[0].documents) == (3, 2)
    assert [line.split(":")[1] for line in report.first_bad] == ["2", "3", "4"]


def test_options_that_do_not_fit_are_errors(folder, tmp_path):
    with pytest.raises(ArgumentError, match="json_keys must be omitted"):
        options(folder, tmp_path / "out", json_keys=("a", "b"))
    with pytest.raises(ArgumentError, match="turn_start and turn_end"):
        ChatConfig(turn_start="a")
    with pytest.raises(ArgumentError, match="train_on must be one of"):
        ChatConfig(train_on="some")
    with pytest.raises(ArgumentError, match="opened with special_tokens=True"):
        preprocess(options(folder, tmp_path / "out"), open_tokenizer(folder / "tokenizer.json"))
    with pytest.raises(ArgumentError, match="a chat template must be a file"):
        preprocess(options(folder, tmp_path / "out", chat=ChatConfig(template=folder / "none")), tokenizer_of(folder))
    with pytest.raises(FormatError, match="must have a chat template, found none"):
        preprocess(options(folder, tmp_path / "out", chat=ChatConfig()), tokenizer_of(folder))
    assert not list(tmp_path.glob("out*.bin"))
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "c"}]}\n')
    with pytest.raises(PlanError, match="at least one document"):
        preprocess(options(folder, tmp_path / "out", inputs=(tmp_path / "in.jsonl",)), tokenizer_of(folder))
    turns = ChatConfig(template=folder / "t.jinja", turn_start="nowhere", turn_end="x")
    with pytest.raises(PlanError, match="1 conversations of which nothing is trained, as 'nowhere' "):
        preprocess(options(folder, tmp_path / "out", inputs=(tmp_path / "in.jsonl",), chat=turns), tokenizer_of(folder))


@pytest.mark.parametrize("further", ['"score": NaN, ', '"score": 1e999, ', '"half": "\\ud83d", ', ""])
def test_numbers_stay_whole_beside_values_that_strict_json_lacks(folder, tmp_path, further):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.tool_calls | tojson }}{% endgeneration %}{% endfor %}"
    )
    line = '{%s"messages": [{"role": "assistant", "tool_calls": [{"count": 2, "big": 123456789012345678901234}]}]}'
    (tmp_path / "in.jsonl").write_text(line % further + "\n")
    chosen = ChatConfig(template=tmp_path / "t.jinja")
    tokenizer = tokenizer_of(folder)
    preprocess(options(folder, tmp_path / "out", inputs=(tmp_path / "in.jsonl",), chat=chosen), tokenizer)
    ((ids, _, _),) = documents_of(tmp_path / "out_chat_document")
    assert tokenizer.detokenize(np.array(ids)) == '[{"count": 2, "big": 123456789012345678901234}]'


@pytest.mark.parametrize(
    ("variables", "message"), [({"a": float("nan")}, "must be JSON values"), ({"tools": []}, "must not be")]
)
def test_variables_that_cannot_be_are_refused(variables, message):
    with pytest.raises(ArgumentError, match=message):
        ChatConfig(variables=variables)
