"""What is replaced, when, and what is put back."""

import ast
import logging
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import numpy as np
import pytest
from megatron.core.datasets import blended_megatron_dataset_builder as builder_module
from megatron.core.datasets import gpt_dataset, helpers
from megatron.core.tokenizers import MegatronTokenizer

import trackbed.megatron
from tests.support import ROOT
from tests.support.megatron_core.cases import VOCAB, Data, write_pair
from tests.support.megatron_core.observe import describe, digests
from trackbed.megatron.acceleration.switch import switch_on

THEIRS = {
    (builder_module.BlendedMegatronDatasetBuilder, "build"): builder_module.BlendedMegatronDatasetBuilder.build,
    **{(gpt_dataset, name): getattr(gpt_dataset, name) for name in ("_build_document_index", "_build_shuffle_index")},
    **{
        (helpers, name): getattr(helpers, name)
        for name in ("build_blending_indices", "build_exhaustive_blending_indices", "build_sample_idx")
    },
}


def run(program):
    """Output of a program."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def is_replaced():
    return [getattr(holder, name) is not own for (holder, name), own in THEIRS.items()]


def test_undo_puts_megatrons_own_functions_back():
    for _ in range(2):
        found = trackbed.megatron.accelerate()
        assert all(is_replaced())
        assert len(found.replaced) == len(THEIRS)
        assert "gpt_dataset._build_document_index" in repr(found)
        found.undo()
        assert not any(is_replaced())
        assert found.replaced == ()
        found.undo()
        assert repr(found) == "<Acceleration: nothing is replaced>"


def test_a_second_call_returns_the_same_object(accelerated):
    now = {place: getattr(*place) for place in THEIRS}
    assert trackbed.megatron.accelerate() is accelerated
    assert all(getattr(*place) is one for place, one in now.items())


def test_names_that_modules_have_imported_are_replaced_and_put_back(monkeypatch):
    here = sys.modules[__name__]
    own = helpers.build_sample_idx
    monkeypatch.setattr(here, "build_sample_idx", own, raising=False)
    found = trackbed.megatron.accelerate()
    assert here.build_sample_idx is helpers.build_sample_idx is not own
    monkeypatch.setattr(here, "_build_shuffle_index", gpt_dataset._build_shuffle_index, raising=False)
    found.undo()
    assert here.build_sample_idx is own
    assert here._build_shuffle_index is THEIRS[gpt_dataset, "_build_shuffle_index"]


def of_others(*_arguments):
    """Stands for a function that another program has put in the place of Megatron's."""
    raise NotImplementedError


def test_functions_of_another_program_stay(monkeypatch, caplog):
    monkeypatch.setattr(gpt_dataset, "_build_shuffle_index", of_others)
    found = trackbed.megatron.accelerate()
    assert gpt_dataset._build_shuffle_index is of_others
    assert not any("shuffle" in name for name in found.replaced)
    assert "_build_shuffle_index: must be Megatron Core's own to be replaced, found <function of_others" in caplog.text
    gpt_dataset._build_document_index = of_others
    found.undo()
    assert gpt_dataset._build_document_index is of_others
    gpt_dataset._build_document_index = THEIRS[gpt_dataset, "_build_document_index"]


@pytest.mark.parametrize("release", ["0.16.0", "0.19.2", None])
def test_another_release_is_left_alone_with_a_warning(release, caplog):
    found = switch_on(release)
    assert found.replaced == ()
    assert not any(is_replaced())
    assert caplog.messages == [
        f"megatron-core: must be 0.16.1 to be accelerated, found {release or 'none'}; it is left alone"
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_an_untested_release_is_not_even_imported(tmp_path):
    (tmp_path / "megatron" / "core").mkdir(parents=True)  # as a checkout on the path
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 15\nPATCH = 3\n")
    found = run(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import trackbed.megatron
        print(trackbed.megatron.accelerate().replaced, "megatron.core" in sys.modules)
        """
    )
    assert found == "() False"


def test_importing_trackbed_imports_no_megatron():
    assert run("import sys, trackbed, trackbed.megatron; print('megatron' in sys.modules)") == "False"


def test_after_install_nothing_is_left_to_accelerate():
    found = run(
        """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
        import trackbed.megatron
        trackbed.megatron.install(parts=("datasets",))
        print(trackbed.megatron.accelerate())
        """
    )
    assert found.splitlines() == [
        f"megatron.core.datasets: Trackbed {trackbed.__version__} is active",
        "megatron.core.datasets: trackbed.megatron.install() has replaced all of it",
        "<Acceleration: nothing is replaced>",
    ]


def test_helpers_that_are_compiled_later_are_replaced_when_a_builder_builds():
    found = run(
        """
        import sys
        class NotCompiled:
            def find_spec(self, name, path=None, target=None):
                if name == "megatron.core.datasets.helpers_cpp":
                    raise ModuleNotFoundError(name=name)
        finder = NotCompiled()
        sys.meta_path.insert(0, finder)
        import trackbed.megatron
        found = trackbed.megatron.accelerate()
        print(len(found.replaced))
        sys.meta_path.remove(finder)
        from tests.megatron.acceleration.test_switch import builder_module, gpt_config, gpt_dataset
        arguments = (gpt_dataset.MockGPTDataset, [3, 3, 3], lambda: True, gpt_config(None, None))
        builder_module.BlendedMegatronDatasetBuilder(*arguments).build()
        print(len(found.replaced))
        """
    )
    assert found.split() == ["3", "6"]


class Subclass(gpt_dataset.GPTDataset):
    """A class of others."""


@dataclass
class ConfigOfOthers(gpt_dataset.GPTDatasetConfig):
    """A configuration of others."""


def gpt_config(prefix, cache, cls=gpt_dataset.GPTDatasetConfig):
    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    chosen = {} if prefix is None else {"blend": ([str(prefix)], None), "split": "8,1,1"}
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=VOCAB)
    return cls(1234, 64, path_to_cache=cache and str(cache), tokenizer=tokenizer, **flags, **chosen)


@pytest.fixture
def prefix(tmp_path):
    data = Data(1, 200, 60, 0.1, "uint16")
    lengths = data.lengths()
    write_pair(tmp_path / "pair", data.tokens(lengths), lengths, np.arange(len(lengths) + 1))
    return tmp_path / "pair"


@pytest.mark.parametrize(
    ("dataset_class", "config_class", "has_cache"),
    [
        (gpt_dataset.GPTDataset, gpt_dataset.GPTDatasetConfig, True),
        (gpt_dataset.GPTDataset, gpt_dataset.GPTDatasetConfig, False),
        (Subclass, gpt_dataset.GPTDatasetConfig, True),
        (gpt_dataset.GPTDataset, ConfigOfOthers, True),
        (gpt_dataset.MockGPTDataset, gpt_dataset.GPTDatasetConfig, False),
    ],
)
def test_what_cannot_be_mirrored_is_built_by_megatron_core(dataset_class, config_class, has_cache, prefix, tmp_path):
    is_mirrored = dataset_class is gpt_dataset.GPTDataset and config_class is gpt_dataset.GPTDatasetConfig and has_cache
    made = {}
    for name in ("theirs", "ours"):
        cache = tmp_path / name if has_cache else None
        pair = None if dataset_class is gpt_dataset.MockGPTDataset else prefix
        found = trackbed.megatron.accelerate() if name == "ours" else None
        try:
            config = gpt_config(pair, cache, config_class)
            builder = builder_module.BlendedMegatronDatasetBuilder(dataset_class, [500, 30, 4], lambda: True, config)
            built = builder.build()
        finally:
            if found is not None:
                found.undo()
        made[name] = [[describe(dataset) for dataset in built], digests(tmp_path / name)]
        if pair and not has_cache:
            beside = prefix / "cache" / "GPTDataset_indices"
            made[name].append(digests(beside))
            for path in beside.iterdir():
                path.unlink()
    assert made["ours"] == made["theirs"]
    assert (tmp_path / "ours" / ".trackbed").exists() == is_mirrored


def test_the_line_of_the_page_replaces_what_it_says():
    page = (ROOT / "docs" / "how-to" / "accelerate-a-megatron-job.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    found = ast.literal_eval(run(program))
    assert len(found) == len(THEIRS)
    assert all(f"`{name.rpartition('.')[2]}" in page for name in found if not name.endswith(".build"))
