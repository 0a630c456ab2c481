"""Hostile blend files: each is planned or built, or refused with error messages."""

import json
import os
import random

import numpy as np
import pytest

from tests.support.hostile.hostile import Case, check, run_cases
from trackbed.tokens import IndexedDatasetBuilder

FAST, FULL = 18, 212

WHOLE = """\
version = 1
sequence_length = 8
seed = 5
order = {order}
split = "9,1"
cache = "indices"
tokenizer = "bytes"
[size]
train = 100
valid = 10
[[dataset]]
path = "web"
weight = 1
[[dataset]]
name = "code"
group = ["a", "b-*"]
weight = 0.5
max_epochs = 900
[[dataset]]
glob = "b-*"
weight = 3
divide = "equally"
repeated = true
[options]
reset_position_ids = true
"""
WHOLE_NUMBERS = [0, 1, 2, 3, 7, 65536, 2**31, 2**32 - 1, 2**40, 2**53, 2**60, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64]
REALS = ["0.1", "1.0", "900.5", "1e15", "1e19", "1e-300", "5e-324", "1e300", "1e308", "1.7976931348623157e308"]
WRONG = ["-1", "nan", "inf", "-inf", "true", "1979-05-27T07:32:00Z", "1" + "0" * 308, "9" * 4301, "0x" + "f" * 9000]
NUMBERS = [*map(str, WHOLE_NUMBERS), *REALS]
PATHS = [
    "web",
    "web.idx",
    "half1",
    "half*",
    "*",
    "/",
    ".",
    "..",
    "/dev/zero",
    "/dev/null",
    "/proc/self/mem",
    "missing/*",
]
PATHS += [
    "[",
    "[!",
    "[z-a]*",
    "***",
    "**/**/**",
    "pipe",
    "pipe*",
    "loop",
    "folder",
    "empty",
    "cut",
    "blend.toml",
    "\\n",
    "\\r",
]
PATHS += ["", "\\u0000", "a\\u0000b", "web\\nx", "\\U0010FFFF", "x" * 300, "x" * 100_000, "d/" * 3000, "*a" * 200]
TEXTS = [
    "9,1",
    "1",
    "0",
    "1,1,1,1",
    "1e400,1",
    "1.2.3",
    "999T",
    "1.5B",
    "7",
    "instant",
    "balanced",
    "bytes",
    "1" * 9000,
]
TEXTS += ["99999999999999999999T", "equally", "tokens", "reweight", "skip", "error"]
OTHERS = [
    "[]",
    "{}",
    "[[]]",
    "[1, 2]",
    '["web", 3]',
    '["web", "web"]',
    '["train"]',
    '["train", "train"]',
    "{a = {b = {}}}",
]
OTHERS += ["", "=", '"', "'''", "{", "[", "\x00", "\xd8\x00", "1 1", "0x", "+-1", "[" + "1," * 500_000 + "]"]
OTHERS += ["[" * 3000 + "]" * 3000, "{a = " * 3000 + "1" + "}" * 3000, '["' + '","'.join(["x"] * 9999) + '"]']
FLAGS = """reset_position_ids add_extra_token_to_sequence full_validation multiple_validation_sets defer_npy_index_mmap
drop_last_partial_validation_sequence fast_cache_load create_cu_seqlens renormalize_blend_weights reset_attention_mask
eod_mask_loss create_attention_mask"""
SIZES = """train valid test train_tokens train_iters global_batch_size eval_interval eval_iters"""
OPTIONS = """mid_level_dataset_surplus num_dataset_builder_threads shuffle_block shuffle_window context_parallel_size
data_parallel_size sequence_parallel_size blend_when_exhausted"""
MEASURES = "weight ratio epochs max_epochs name divide splits incomplete"
TABLES = {"size": SIZES.split(), "dataset": MEASURES.split(), "options": [*OPTIONS.split(), *FLAGS.split()]}
TABLES[""] = ["seed", "sequence_length", "order", "cache", "tokenizer", "weird", "a.b.c", "'quoted'", '""']
KNOWN = [
    ('path = "web"', 'path = "a\\u0000b"'),
    ('path = "web"', 'path = "pipe"'),
    ("seed = 5", "seed = " + "[" * 3000 + "]" * 3000),
    ("weight = 3", "epochs = 1e308"),
    ("weight = 0.5", "weight = 1" + "0" * 400),
    ("train = 100", "train = 9223372036854775807"),
]
"""Changes that once caused a fault; always tested."""


def write_data(folder):
    """Writes valid pairs and invalid files."""
    for number, name in enumerate(("web", "a", "b-1", "b-2", "half1")):
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), np.uint16)
        lengths = [number * 10 + n for n in range(30)]
        builder.add_documents(np.arange(sum(lengths), dtype=np.uint16) % 99, lengths)
        builder.finalize(str(folder / f"{name}.idx"))
    (folder / "half1.bin").unlink()
    for suffix in (".bin", ".idx"):
        (folder / f"empty{suffix}").touch()
        (folder / f"folder{suffix}").mkdir()
        (folder / f"loop{suffix}").symlink_to(f"loop{suffix}")
        (folder / f"cut{suffix}").write_bytes((folder / f"web{suffix}").read_bytes()[:50])
        os.mkfifo(folder / f"pipe{suffix}")


def value(draw, key):
    """Returns a value for a key, mostly one of the right type."""
    if draw.random() < 0.2:
        return draw.choice([*WRONG, *OTHERS, *(f'"{text}"' for text in [*TEXTS, *PATHS])])
    if key in FLAGS.split():
        return draw.choice(["true", "false"])
    if key == "group":
        return "[" + ", ".join(f'"{draw.choice(PATHS)}"' for _ in range(draw.choice([1, 2, 5]))) + "]"
    if key in ("path", "glob", "cache", "tokenizer", "name"):
        return f'"{draw.choice(PATHS)}"'
    if key in ("order", "split", "divide", "incomplete", "blend_when_exhausted", "train_tokens"):
        return f'"{draw.choice(TEXTS)}"'
    whole = [*SIZES.split(), *OPTIONS.split()[1:], "version", "seed", "sequence_length"]
    return str(draw.choice(WHOLE_NUMBERS) if key in whole else draw.choice(NUMBERS))


def change_values(draw, lines):
    """Changes the values of some keys."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.choice([number for number, line in enumerate(lines) if " = " in line])
        key = lines[at].partition(" = ")[0]
        lines[at] = f"{key} = {value(draw, key)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def add_keys(draw, lines):
    """Adds keys, mostly to the table that has them."""
    for _ in range(draw.choice([1, 1, 2, 5])):
        table = draw.choice(list(TABLES))
        key = draw.choice(TABLES[table if draw.random() < 0.9 else draw.choice(list(TABLES))])
        lines[:] = [line for line in lines if not line.startswith(f"{key} = ") or draw.random() < 0.1]
        heads = [number + 1 for number, line in enumerate(lines) if line.strip("[]") == table and line != table]
        lines.insert(draw.choice(heads or [0]), f"{key} = {value(draw, key)}")
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def move_lines(draw, lines):
    """Repeats, moves or deletes lines."""
    for _ in range(draw.choice([1, 2, 5])):
        at, to = draw.randrange(len(lines)), draw.randrange(len(lines))
        lines[to:to] = [lines[at]] * draw.choice([0, 1, 1, 300])
        if draw.random() < 0.5:
            del lines[draw.randrange(len(lines))]
    return "\n".join(lines).encode()


def change_bytes(draw, lines):
    """Changes bytes, and deletes or duplicates parts."""
    raw = bytearray("\n".join(lines).encode())
    for _ in range(draw.choice([1, 1, 3, 20])):
        at = draw.randrange(len(raw))
        if draw.random() < 0.6:
            raw[at] = draw.randrange(256)
        elif draw.random() < 0.5:
            del raw[at : at + draw.randrange(30)]
        else:
            raw[at:at] = raw[at : at + draw.randrange(200)]
    return bytes(raw)


def make_huge(draw, lines):
    """Makes some element very large or very frequent."""
    text = "\n".join(lines)
    return draw.choice(
        [
            text + "\n[[dataset]]\npath = 'nowhere'\nname = 'x'\nweight = 1" * 5000,
            text + "".join(f"\n[[dataset]]\npath = 'n{n}'\nweight = 1" for n in range(5000)),
            text + "\n" + "k" + ".k" * 1_000_000 + " = 1",
            text + "\n[" + "k" + ".k" * 250 + "]\nx = 1\n" * 1,
            text + "\nx = '" + "y" * (15 << 20) + "'",
            text + "\n#" + "y" * (20 << 20),
            text + "\n" + "".join(f"k{n} = {n}\n" for n in range(100_000)),
            text + "\n" + "\n" * 5_000_000,
            "[" * 10_000_000,
            "x = " + "[" * 1_000_000 + "]" * 1_000_000,
            text.replace('["a", "b-*"]', "[" + ", ".join(['"a"'] * 200_000) + "]"),
            text.replace('["a", "b-*"]', "[" + ", ".join(['"*"'] * 500) + "]"),
            text + "\n[[stage]]\nfrom_sample = 1\nweights = {web = 1}\n" * 3000,
            text + "\n[tokenizer.megatron]\nclass = 'a'\noptions = {a = [[[[{b = 1}]]]]}",
            "\ufeff" + text,
            text.replace("\n", "\r"),
        ]
    ).encode()


def hostile_file(seed):
    """Returns the bytes of a blend file, and a description of the change."""
    if seed < len(KNOWN):
        old, new = KNOWN[seed]
        return WHOLE.format(order='"megatron"').replace(old, new).encode(), f"{old} made {new[:80]}"
    draw = random.Random(seed)
    order = draw.choice(['"megatron"', '"balanced"', '"instant"'])
    how = draw.choice(
        [change_values, change_values, change_values, add_keys, add_keys, move_lines, change_bytes, make_huge]
    )
    raw = how(draw, WHOLE.format(order=order).splitlines())
    return raw, f"seed {seed}: {how.__doc__} {order}"


def cases(folder, seeds):
    for seed in seeds:
        here = folder / str(seed)
        here.mkdir()
        write_data(here)
        raw, what = hostile_file(seed)
        (here / "blend.toml").write_bytes(raw)
        yield Case(here, ["blend", "blend.toml", "--json"], what)
        yield Case(here, ["build", "blend.toml", "--threads", "2"], what)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(FAST), id="some"),
        pytest.param(range(FAST, FAST + FULL), id="many", marks=pytest.mark.slow),
    ],
)
def test_a_hostile_blend_file_is_planned_or_refused_in_sentences(tmp_path, seeds):
    outcomes = run_cases(list(cases(tmp_path, seeds)))
    counts = check(outcomes)
    assert counts[0] > 0
    assert counts[1] > counts[0]
    for outcome in outcomes:
        if outcome.code == 0 and outcome.case.arguments[0] == "blend":
            for split in json.loads(outcome.stdout)["splits"]:
                assert sum(one["samples"] for one in split["datasets"]) == split["samples"]
