"""Mock datasets of text and images."""

import pytest
import torch

from tests.support.files.blends import VOCAB, build
from trackbed.datasets import MockGPTDataset, MockMultimodalDataset, MultimodalDatasetConfig, NullTokenizer
from trackbed.errors import ArgumentError


def config(**options):
    return MultimodalDatasetConfig(
        **{
            "random_seed": 7,
            "sequence_length": 16,
            "tokenizer": NullTokenizer(VOCAB),
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "image_h": 3,
            "image_w": 5,
            **options,
        }
    )


def test_a_sample_is_that_of_the_mock_gpt_dataset_with_an_image():
    plain, train = build(config(), cls=MockGPTDataset)[0], build(config(), cls=MockMultimodalDataset)[0]
    assert len(train) == len(plain)
    for position in (0, 7, -1):
        sample, wanted = train[position], plain[position]
        image = sample.pop("image")
        assert (image.shape, image.dtype, image.any().item()) == ((3, 3, 5), torch.float32, False)
        assert list(sample) == list(wanted)
        assert all(torch.equal(sample[name], wanted[name]) for name in wanted)
    assert train[None]["loss_mask"].sum() == 0


def test_samples_are_preprocessed():
    def first_tokens(sample):
        return {"tokens": sample["tokens"][:2], "image": sample["image"] + 1}

    train = build(config(preprocess_func=first_tokens), cls=MockMultimodalDataset)[0]
    assert train[3]["tokens"].shape == (2,)
    assert train[3]["image"].sum() == 45


@pytest.mark.parametrize("name", ["image_h", "image_w"])
@pytest.mark.parametrize("value", [None, 0, -1, 2.5, True, "3"])
def test_the_size_of_an_image_must_be_given(name, value):
    with pytest.raises(ArgumentError, match=f"^{name} must be an integer of at least 1, found {value!r}"):
        config(**{name: value})
