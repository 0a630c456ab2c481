"""Taking over a Megatron job: from its arguments and what it has consumed, the next batch is the one it would read."""

import pytest

from tests.support.files.blends import VOCAB, write_pairs
from tests.support.megatron_core.cases import DEFAULT_TOKENIZER, identity
from tests.support.megatron_core.observe import sample
from tests.support.megatron_core.oracle import running
from tests.support.megatron_core.release import IS_NEWER
from trackbed.blends import measure_blend, read_blend_file
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.loading import MegatronPretrainingSampler

BATCH, MICRO_BATCH, RANKS, ITERATIONS, INTERVAL, EVALUATIONS = 12, 2, 3, 40, 10, 2
NULL = VOCAB + IS_NEWER
"""Vocabulary of their tokenizer, whose last id VOCAB is."""
BLEND = f"""\
version = 1
seed = 4321
sequence_length = 16
split = "8,1,1"
cache = "cache"
[size]
train_iters = {ITERATIONS}
global_batch_size = {BATCH}
eval_interval = {INTERVAL}
eval_iters = {EVALUATIONS}
[options]
reset_position_ids = true
eod_mask_loss = true
[tokenizer]
eod = {VOCAB}
vocab_size = {VOCAB + 1}
[tokenizer.megatron]
class = "{DEFAULT_TOKENIZER}"
options = {{vocab_size = {NULL}}}
[[dataset]]
path = "pair0"
weight = 30
[[dataset]]
glob = "pair[12]"
weight = 70
divide = "equally"
"""


@pytest.fixture(scope="module")
def oracle():
    with running() as started:
        yield started


@pytest.mark.parametrize("steps", [0, 1, 17, ITERATIONS - 1])
def test_the_next_batch_of_a_megatron_job_is_read(oracle, tmp_path, monkeypatch, steps):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path)
    consumed = steps * BATCH
    (tmp_path / "blend.toml").write_text(BLEND)
    blend = measure_blend(read_blend_file("blend.toml"))
    config = blend.config()
    train, *_ = BlendedMegatronDatasetBuilder(blend.dataset_class, blend.sizes, lambda: True, config).build()

    # The job's arguments, as Megatron-LM turns them into a configuration and sizes.
    tokenizer = {"kind": "null", "path": "", "vocab_size": VOCAB}
    names = ("random_seed", "sequence_length", "split", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    names += ("create_attention_mask",)
    (tmp_path / "theirs").mkdir()
    job = {
        **{name: getattr(config, name) for name in names},
        "blend": [[str(tmp_path / f"pair{number}") for number in range(3)], [30, 35, 35]],
        "path_to_cache": str(tmp_path / "theirs"),
    }
    sizes = [ITERATIONS * BATCH, (ITERATIONS // INTERVAL + 1) * EVALUATIONS * BATCH, EVALUATIONS * BATCH]
    wanted = list(range(consumed, consumed + BATCH))
    asked = {"config": job, "sizes": sizes, "tokenizer": tokenizer, "positions": wanted}
    theirs = oracle.ask(asked)["datasets"][0]["samples"]
    assert identity(tokenizer)["options"] == {"vocab_size": NULL}

    read = []
    batches = [
        iter(MegatronPretrainingSampler(len(train), consumed, MICRO_BATCH, rank, RANKS)) for rank in range(RANKS)
    ]
    for _ in range(BATCH // (MICRO_BATCH * RANKS)):
        read += [position for rank in range(RANKS) for position in next(batches[rank])]
    assert sorted(read) == wanted
    assert {str(position): sample(train, position) for position in read} == theirs
