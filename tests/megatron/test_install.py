"""Tests of `trackbed.megatron` in fresh interpreters, as in a user's program."""

import re
import subprocess
import sys
import textwrap

import pytest

from tests.support.megatron_core.release import needs_the_wrappers_layouts
from trackbed.version import __version__


def run(program):
    """Output of a program."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_modules_are_there_without_installing_and_without_megatron_core():
    assert (
        run(
            """
            import sys
            from trackbed.megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
            from trackbed.megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
            from trackbed.megatron.core.datasets.utils import Split, compile_helpers, log_single_rank
            from trackbed.megatron.core.datasets import helpers
            import trackbed.datasets
            assert GPTDataset is trackbed.datasets.GPTDataset
            compile_helpers()
            print("megatron" in sys.modules)
            """
        )
        == "False"
    )


@pytest.mark.parametrize(("numbers", "said"), [((0, 16, 1), ""), ((0, 16, 10), "0.16.10"), ((0, 15, 0), "0.15.0")])
def test_another_version_of_megatron_core_is_warned_of(tmp_path, numbers, said):
    (tmp_path / "megatron" / "core").mkdir(parents=True)  # as a checkout on the path
    lines = [f"{name} = {number}\n" for name, number in zip(("MAJOR", "MINOR", "PATCH"), numbers, strict=True)]
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("".join(lines))
    found = run(
        f"""
        import logging, sys
        sys.path.insert(0, {str(tmp_path)!r})
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
        import trackbed.megatron
        trackbed.megatron.install()
        """
    )
    wanted = f"WARNING megatron-core {said}: must be 0.16.1 or 0.19.2 to be what Trackbed is compared with"
    assert found == (wanted if said else "")


def test_a_megatron_core_whose_optimizer_plans_the_buffers_keeps_its_wrapper(tmp_path):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\n")
    found = run(
        f"""
        import logging, sys
        sys.path.insert(0, {str(tmp_path)!r})
        logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
        import trackbed.megatron
        try:
            trackbed.megatron.install(parts=("datasets", "distributed"))
        except Exception as error:
            print(type(error).__name__, error)
        trackbed.megatron.install()
        finder = sys.meta_path[0]
        print(sorted({{path.partition(".")[0] for path in finder.modules}}))
        """
    )
    assert found.splitlines() == [
        "ArgumentError parts: 'distributed' must be left out with megatron-core 0.18 and later, whose optimizer plans "
        "the buffers, found 0.19.2",
        "WARNING megatron-core 0.19.2: keeps its own megatron.core.distributed, as its optimizer plans the buffers",
        "['datasets', 'dist_checkpointing']",
    ]


def test_every_name_of_the_table_is_there():
    from importlib import import_module

    import trackbed.megatron
    from trackbed.megatron.table import MODULES

    for path, names in MODULES.items():
        module = import_module(f"{trackbed.megatron.__name__}.core.{path}")
        for name, what in names.items():
            source, _, attribute = what.partition(":")
            assert getattr(module, name) is getattr(import_module(source), attribute)


def test_the_package_distributed_is_there_without_megatron_core():
    assert (
        run(
            """
            import sys
            from trackbed.megatron.core import distributed
            from trackbed.megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
            from trackbed.megatron.core.distributed import distributed_data_parallel, distributed_data_parallel_config
            assert distributed_data_parallel.DistributedDataParallel is DistributedDataParallel
            assert distributed_data_parallel_config.DistributedDataParallelConfig is DistributedDataParallelConfig
            named = {}
            exec("from trackbed.megatron.core.distributed import *", named)
            assert named["DistributedDataParallel"] is DistributedDataParallel
            print(distributed.__all__, "megatron" in sys.modules)
            """
        )
        == "['DistributedDataParallel', 'DistributedDataParallelConfig', 'finalize_model_grads'] False"
    )


def test_loggers_and_names_of_types_are_trackbeds():
    """A level that is set on a logger of a module reaches what Trackbed logs there."""
    import logging
    from typing import get_args

    import torch
    from trackbed.megatron.core.datasets import blended_megatron_dataset_builder as builder
    from trackbed.megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from trackbed.megatron.core.dist_checkpointing.strategies import fully_parallel
    from trackbed.megatron.core.distributed import param_and_grad_buffer

    from trackbed.datasets import BlendedDataset, GPTDataset, MegatronDataset
    from trackbed.datasets.low_level import IndexedDataset

    assert fully_parallel.logger.name == fully_parallel.FullyParallelSaveStrategyWrapper.__module__
    assert set(fully_parallel.T.__constraints__) == {ShardedObject, ShardedTensor}
    assert set(get_args(builder.TopLevelDataset)) == {BlendedDataset, MegatronDataset}
    for kind in (BlendedDataset, GPTDataset, IndexedDataset, torch.utils.data.Dataset, list):
        assert issubclass(kind, builder.DistributedDataset)
    loggers = [logging.getLogger(f"trackbed.grads.{name}") for name in ("buffer", "bucket_group")]
    level = param_and_grad_buffer.logger.level
    try:
        param_and_grad_buffer.logger.setLevel(logging.CRITICAL)
        assert [logger.getEffectiveLevel() for logger in loggers] == [logging.CRITICAL] * 2
    finally:
        param_and_grad_buffer.logger.setLevel(level)


@needs_the_wrappers_layouts
def test_the_rerun_state_machine_of_an_installed_megatron_core_may_have_a_step_run_again():
    pytest.importorskip("megatron.core.rerun_state_machine")
    assert run(
        """
            import trackbed.megatron
            trackbed.megatron.install(parts=("distributed",))
            import torch
            from megatron.core import rerun_state_machine
            from megatron.core.distributed import DistributedDataParallelConfig
            from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer, partition_buckets

            class One:
                def rank(self):
                    return 0

                def size(self):
                    return 1

            param = torch.nn.Parameter(torch.ones(3))
            names = {param: "w"}
            options = (DistributedDataParallelConfig(), torch.float32, torch.float32, [param], One(), None, names)
            (group,) = partition_buckets([_ParamAndGradBuffer(*options, 1.0, [0], False)])
            param.main_grad[1] = float("nan")
            try:
                group.check_grads(True, False)
            except RuntimeError as error:
                print(type(error).__name__, error)
            machine = rerun_state_machine.get_rerun_state_machine()
            machine.set_mode(rerun_state_machine.RerunMode.VALIDATE_RESULTS)
            machine.state = rerun_state_machine.RerunState.INITIAL_RUN
            machine.first_iteration_complete = True
            group.check_grads(True, False)
            print(machine.rerun_requested)
            """
    ).splitlines() == [
        "NonFiniteGradientError rank 0: gradients must be finite, but that of w in bucket 0 is NaN: its norm is nan",
        "True",
    ]


def test_an_unknown_name_is_an_attribute_error():
    from trackbed.megatron.core.datasets import gpt_dataset

    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = gpt_dataset.nonsense


def test_without_megatron_core_its_module_paths_import_trackbed():
    assert (
        run(
            """
            import importlib.machinery, sys
            real = importlib.machinery.PathFinder.find_spec
            def hiding(name, path=None, target=None):
                return None if name.split(".")[0] == "megatron" else real(name, path, target)
            importlib.machinery.PathFinder.find_spec = staticmethod(hiding)
            import trackbed.megatron
            trackbed.megatron.install()
            from megatron.core.datasets.indexed_dataset import IndexedDataset
            import megatron.core.datasets.gpt_dataset
            print(IndexedDataset.__module__, megatron.core.datasets.gpt_dataset.GPTDataset.__module__)
            """
        )
        == "trackbed.datasets.low_level trackbed.datasets.gpt.dataset"
    )


def test_the_rest_of_an_installed_megatron_core_keeps_working():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    assert (
        run(
            """
            import trackbed.megatron
            trackbed.megatron.install()
            trackbed.megatron.install()
            from megatron.core.datasets.gpt_dataset import GPTDataset, _build_document_index
            from megatron.core.datasets.helpers import build_mapping, build_sample_idx
            from megatron.core.datasets import data_schedule, masked_dataset, multimodal_dataset, t5_dataset
            from megatron.core.datasets.megatron_tokenizer import MegatronLegacyTokenizer, MegatronTokenizer
            from megatron.core.datasets.object_storage_utils import ObjectStorageConfig
            import megatron.core.transformer
            import trackbed.datasets
            assert GPTDataset is trackbed.datasets.GPTDataset
            assert issubclass(masked_dataset.MaskedWordPieceDataset, trackbed.datasets.MegatronDataset)
            assert issubclass(multimodal_dataset.MockMultimodalDataset, trackbed.datasets.MockGPTDataset)
            assert MegatronLegacyTokenizer is MegatronTokenizer is trackbed.datasets.MegatronTokenizer
            named = {}
            exec("from megatron.core.datasets.helpers import *", named)
            assert named["build_mapping"] is build_mapping and named["build_sample_idx"] is build_sample_idx
            print(build_sample_idx.__module__, _build_document_index.__module__)
            """
        )
        == "trackbed.megatron.functions megatron.core.datasets.gpt_dataset"
    )


@needs_the_wrappers_layouts
def test_an_installed_megatron_core_runs_on_the_part_distributed():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    assert (
        run(
            """
            import trackbed.megatron
            trackbed.megatron.install(parts=("distributed",))
            import megatron.core
            import megatron.core.datasets.gpt_dataset
            from megatron.core.distributed import DistributedDataParallel, finalize_model_grads, param_and_grad_buffer
            from megatron.core.optimizer import distrib_optimizer
            assert megatron.core.DistributedDataParallel is DistributedDataParallel
            assert distrib_optimizer._ParamAndGradBuffer is param_and_grad_buffer._ParamAndGradBuffer
            print(
                DistributedDataParallel.__module__,
                distrib_optimizer._ParamAndGradBuffer.__module__,
                finalize_model_grads.__module__,
                megatron.core.datasets.gpt_dataset.GPTDataset.__module__,
            )
            """
        )
        == "trackbed.megatron.ddp trackbed.grads.buffer megatron.core.distributed.finalize_model_grads "
        "megatron.core.datasets.gpt_dataset"
    )


@pytest.mark.parametrize("parts", ["datasets", ("datasets", "nonsense"), ("",)])
def test_an_unknown_part_is_an_argument_error(parts):
    import trackbed.megatron
    from trackbed.errors import ArgumentError

    with pytest.raises(ArgumentError, match=r"parts: must be a collection of names among .*'datasets'.*, found"):
        trackbed.megatron.install(parts=parts)


def test_the_part_datasets_replaces_nothing_else():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    assert (
        run(
            """
            import trackbed.megatron
            trackbed.megatron.install(parts=("datasets",))
            from megatron.core.datasets.gpt_dataset import GPTDataset
            from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
            from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
            names = (GPTDataset, DistributedDataParallel, DistributedDataParallelConfig, _ParamAndGradBuffer)
            print(*(name.__module__.partition(".")[0] for name in names))
            """
        )
        == "trackbed megatron megatron megatron"
    )


def test_a_second_call_adds_its_parts():
    assert (
        run(
            """
            import sys
            import trackbed.megatron
            rows = {"first.module": {"dumps": "json:dumps"}, "second.module": {"loads": "json:loads"}}
            trackbed.megatron.MODULES = rows
            trackbed.megatron.PARTS = ("first", "second")
            trackbed.megatron.install(parts=["first"])
            from megatron.core.first.module import dumps
            try:
                import megatron.core.second.module
            except ModuleNotFoundError:
                print("absent")
            finders = len(sys.meta_path)
            trackbed.megatron.install(parts={"first", "second"})
            import megatron.core.second.module
            import json
            assert megatron.core.second.module.loads is json.loads
            assert megatron.core.first.module.dumps is dumps
            assert len(sys.meta_path) == finders
            """
        )
        == "absent"
    )


def test_installing_too_late_names_the_importer():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    found = run(
        """
        import sys, types
        early = types.ModuleType("early_bird")
        sys.modules["early_bird"] = early
        exec("from megatron.core.datasets.gpt_dataset import GPTDataset", vars(early))
        import trackbed.megatron
        try:
            trackbed.megatron.install()
        except Exception as error:
            print(type(error).__name__, error)
        """
    )
    assert found.startswith("TrackbedError trackbed.megatron.install() must come before")
    assert "early_bird" in found


def test_an_importer_that_binds_the_top_package_is_named():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    found = run(
        """
        import sys, types
        early = types.ModuleType("early_bird")
        sys.modules["early_bird"] = early
        exec("import megatron.core.datasets.gpt_dataset", vars(early))
        import trackbed.megatron
        try:
            trackbed.megatron.install(parts=("datasets",))
        except Exception as error:
            print(error)
        """
    )
    assert "found megatron.core.datasets." in found
    assert re.search("imported by .*early_bird", found)


@pytest.mark.parametrize("statement", ["import megatron.core", "from megatron.core import parallel_state"])
def test_installing_after_megatron_core_says_what_it_imports(statement):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    found = run(
        f"""
        import sys, types
        early = types.ModuleType("early_bird")
        sys.modules["early_bird"] = early
        exec("{statement}", vars(early))
        import trackbed.megatron
        try:
            trackbed.megatron.install()
        except Exception as error:
            print(error)
        trackbed.megatron.install(parts=("datasets",))
        """
    )
    assert "must come before megatron.core is imported, which imports megatron.core.dist_checkpointing; found" in found
    assert re.search("imported by .*early_bird", found)


def test_it_logs_what_is_active():
    program = """
        import logging, sys, trackbed.megatron
        form = "%(name)s %(levelname)s %(message)s"
        logging.basicConfig(level=logging.INFO, format=form, stream=sys.stdout)
        trackbed.megatron.install(parts=("datasets",))
        trackbed.megatron.install(parts=("datasets",))
        """
    assert run(program) == f"trackbed INFO megatron.core.datasets: Trackbed {__version__} is active"
