"""One of three gloo ranks that call Megatron Core's wrappers and requests: no arguments. Prints the results."""

import json
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trackbed.checkpoint import ShardedObject, ShardedTensor
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import serialization
from trackbed.megatron.checkpoints.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from trackbed.megatron.checkpoints.strategies import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

CASES = {}
WAYS = ("broadcast", "gather_rounds", "gather_object")


def case(function):
    CASES[function.__name__] = function
    return function


class OwnSave(SaveShardedStrategy):
    """A strategy of a program, which writes nothing."""

    def __init__(self, error=None):
        super().__init__("own", 1)
        self.error = error

    def save(self, sharded_state_dict, checkpoint_dir):
        if self.error is not None:
            raise self.error
        return "saved"


class OwnLoad(LoadShardedStrategy):
    """A strategy of a program, which reads nothing: tensors are sevens."""

    can_handle_sharded_objects = True

    def __init__(self, error=None):
        self.error = error

    def load(self, sharded_state_dict, checkpoint_dir):
        if self.error is not None:
            raise self.error
        return {
            key: torch.full(entry.local_shape, 7.0) if isinstance(entry, ShardedTensor) else f"object {entry.key}"
            for key, entry in sharded_state_dict.items()
        }

    def load_tensors_metadata(self, checkpoint_dir):
        return {}

    def check_backend_compatibility(self, loaded_version):
        pass

    check_version_compatibility = check_backend_compatibility


def tensor(key, value=0.0, replica_id=None, size=5):
    replica_id = dist.get_rank() if replica_id is None else replica_id
    return ShardedTensor.from_rank_offsets(key, torch.full((size,), value), replica_id=replica_id)


def state(value=0.0):
    keys = "abc"
    copies = {key: tensor(key, value) for key in keys}
    return {**copies, "o": ShardedObject("o", {"value": value}, (1,), (0,), replica_id=dist.get_rank())}


def values(loaded):
    return {key: found.tolist() if isinstance(found, torch.Tensor) else found for key, found in loaded.items()}


def error_of(call):
    """Classes and text of what a call raises; None if it returns."""
    try:
        call()
    except Exception as error:
        return [[kind.__name__ for kind in type(error).__mro__], str(error)]
    return None


def in_another_process(method, request):
    context = multiprocessing.get_context(method)
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()
    process = context.Process(target=request.async_fn, args=arguments, kwargs=request.async_fn_kwargs)
    process.start()
    process.join(20)
    dist.barrier()
    return process.exitcode


def complete(request):
    for call in request.finalize_fns:
        call()


def requests(folder, method):
    """A request of a strategy, one of a wrapper, and one of `save`, each written by another process."""
    found = []
    for number, strategy in enumerate((TorchDistSaveShardedStrategy(), saver(), saver())):
        path = folder / f"{method}-{number}"
        if number < 2:
            path.mkdir(exist_ok=True)
            dist.barrier()
            request = strategy.async_save(state(number + 1.0), path)
        else:
            request = serialization.save({**state(3.0), "step": 3}, path, strategy, async_sharded_save=True)
        found.append(in_another_process(method, request))
        complete(request)
        dist.barrier()
        loaded = TorchDistLoadShardedStrategy().load(state(), path)
        found.append([values(loaded), sorted(file.name for file in path.iterdir())])
    return found


def saver(**options):
    return FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), **options)


@case
def a_request_in_a_forked_process(folder, _):
    return requests(folder, "fork")


@case
def a_request_as_a_pickle(folder, _):
    request = serialization.save({**state(4.0), "step": 4}, folder / "pickled", saver(), async_sharded_save=True)
    write, arguments = pickle.loads(pickle.dumps((request.async_fn, request.async_fn_args)))
    write(*arguments)
    dist.barrier()
    complete(request)
    return values(serialization.load(state(), folder / "pickled"))


@case
def a_request_whose_process_fails_on_one_rank(folder, _):
    def broken(*arguments):
        os._exit(3)

    request = serialization.save(state(5.0), folder / "broken", saver(), async_sharded_save=True)
    if dist.get_rank() == 1:
        request = request._replace(async_fn=broken)
    in_another_process("fork", request)
    found = error_of(lambda: complete(request))
    dist.barrier()
    return [*found, sorted(file.name for file in folder.iterdir() if "broken" in file.name)]


@case
def a_request_that_cannot_write_in_a_forked_process(folder, _):
    path = folder / "gone"
    path.mkdir(exist_ok=True)
    dist.barrier()
    request = saver().async_save(state(5.0), path)
    (path / "__1_0.distcp").touch()  # so that rank 1 cannot create its file
    dist.barrier()
    code = in_another_process("fork", request)
    return [code, *error_of(lambda: complete(request))]


@case
def a_request_that_fails_at_once_on_one_rank(folder, _):
    def broken(*arguments):
        raise OSError("no")

    request = serialization.save(state(5.0), folder / "failed", saver(), async_sharded_save=True)
    if dist.get_rank() == 1:
        request = request._replace(async_fn=broken)
    found = error_of(request.execute_sync)
    dist.barrier()
    return [*found, sorted(file.name for file in folder.iterdir() if "failed" in file.name)]


def alone(apply):
    """The replica ids that a second call sets at once, for which rank 1 comes later."""
    apply(state())
    dist.barrier()
    if dist.get_rank():
        time.sleep(0.5)
    start, own = time.monotonic(), state()
    apply(own)
    seconds = time.monotonic() - start
    dist.barrier()
    return [seconds, [own[key].replica_id for key in "abc"]]


@case
def a_cached_distribution(folder, _):
    return [
        alone(FullyParallelSaveStrategyWrapper(OwnSave(), None, True).apply_saving_parallelization),
        alone(FullyParallelLoadStrategyWrapper(OwnLoad(), None, True).apply_loading_parallelization),
    ]


@case
def a_cached_distribution_of_another_structure(folder, _):
    found = []
    for wrapper, name in (
        (FullyParallelSaveStrategyWrapper(OwnSave(), None, True), "apply_saving_parallelization"),
        (FullyParallelLoadStrategyWrapper(OwnLoad(), None, True), "apply_loading_parallelization"),
    ):
        apply = getattr(wrapper, name)
        apply(state())
        fewer = {key: entry for key, entry in state().items() if key != "b"}
        for other in ({**state(), "d": tensor("d")}, fewer, {**state(), "c": tensor("c", size=6)}):
            found.append(error_of(lambda apply=apply, other=other: apply(other))[1])
        apply(state())
    return found


@case
def a_load_in_a_group_of_one(folder, own_group):
    if dist.get_rank():
        return None
    start = time.monotonic()
    found = [values(FullyParallelLoadStrategyWrapper(OwnLoad(), own_group).load(state(), folder))]
    found.append(values(loader(own_group).load(state(), folder / "saved")))
    return [*found, time.monotonic() - start]


@case
def a_load_of_two_ranks_of_three(folder, own_group):
    """The third has the main replica of the object, and is not there."""
    pair = dist.new_group([0, 1])
    rank = dist.get_rank()
    if rank == 2:
        return None
    found = []
    for way in WAYS:
        for strategy in (OwnLoad(), TorchDistLoadShardedStrategy()):
            own = {**state(), "o": ShardedObject("o", None, (1,), (0,), replica_id=2 - rank)}
            wrapper = FullyParallelLoadStrategyWrapper(strategy, pair, exchange_algo=way)
            found.append(values(wrapper.load(own, folder / "saved")))
    return found


def loader(group=None, **options):
    return FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group, **options)


@case
def what_a_strategy_returns(folder, _):
    return FullyParallelSaveStrategyWrapper(OwnSave()).save(state(), folder)


@case
def what_a_strategy_raises(folder, _):
    class OwnError(Exception):
        def __init__(self, code, reason):
            super().__init__(code, reason)
            self.code = code

    found = []
    for error in (FileNotFoundError(2, "nothing there", "file"), NotImplementedError("not made"), OwnError(7, "why")):
        for call in (FullyParallelLoadStrategyWrapper(OwnLoad(error)).load,
                     FullyParallelSaveStrategyWrapper(OwnSave(error)).save):  # fmt: skip
            found.append(error_of(lambda call=call: call(state(), folder)))
            dist.barrier()
    return found


@case
def an_unknown_way_to_exchange(folder, _):
    return [
        error_of(lambda: loader(exchange_algo="x").load(state(), folder / "saved")),
        error_of(lambda: serialization.load(state(), folder / "saved", loader(exchange_algo="x"))),
    ]


def lost(size=5):
    """Nobody has a main replica of b."""
    return {**state(), "b": tensor("b", replica_id=1 + dist.get_rank(), size=size)}


@case
def a_tensor_without_a_main_replica(folder, own_group):
    found = []
    for call in (
        lambda: FullyParallelSaveStrategyWrapper(OwnSave()).apply_saving_parallelization(lost()),
        lambda: FullyParallelSaveStrategyWrapper(OwnSave(), own_group).apply_saving_parallelization(lost()),
        lambda: FullyParallelSaveStrategyWrapper(OwnSave()).save(lost(), folder),
        lambda: saver().save(lost(), folder),
        lambda: saver(parallelization_group=own_group).save(lost(), folder),
        lambda: saver().async_save(lost(), folder),
        lambda: TorchDistSaveShardedStrategy().save(lost(), folder),
        *(
            lambda strategy=strategy, later=later: serialization.save(
                lost(), folder / "lost", strategy, validate_access_integrity=False, async_sharded_save=later
            )
            for strategy, later in (
                (None, False),
                (None, True),
                (saver(), False),
                (saver(), True),
                (OwnSave(), False),
                (FullyParallelSaveStrategyWrapper(OwnSave()), False),
            )
        ),
    ):
        before = sorted(file.name for file in folder.iterdir())
        dist.barrier()
        text = error_of(call)
        dist.barrier()
        found.append([text, before == sorted(file.name for file in folder.iterdir())])
    return found


@case
def an_object_without_a_main_replica(folder, _):
    own = {**state(), "o": ShardedObject("o", 1, (1,), (0,), replica_id=1 + dist.get_rank())}
    return [
        error_of(lambda: FullyParallelSaveStrategyWrapper(OwnSave()).save(own, folder)),
        error_of(lambda: serialization.save(own, folder / "o", saver(), validate_access_integrity=False)),
    ]


@case
def a_main_replica_in_another_group(folder, own_group):
    """Each rank is a group: that of rank 1 has copies alone."""
    own = state(6.0)
    wrapper = FullyParallelSaveStrategyWrapper(OwnSave(), own_group)
    wrapper.apply_saving_parallelization(own)
    path = folder / "groups"
    strategy = saver(parallelization_group=own_group)
    serialization.save(state(6.0), path, strategy, validate_access_integrity=False)
    return [[own[key].replica_id for key in "abc"], values(serialization.load(state(), path))]


@case
def a_copy_of_a_larger_box_at_the_place_of_the_main_replica(folder, _):
    """Only a rank with the box of the main replica may be chosen to save it: the greedy choice is rank 0 first."""
    rank = dist.get_rank()
    size, replica_id = ((3, 1), (5, 0), (2, 2))[rank]
    own = {
        "w": ShardedTensor("w", torch.arange(float(size)), torch.float32, (size,), (5,), (0,), None, replica_id),
        "x": tensor("x", 2.0),
    }
    path = folder / "boxes"
    serialization.save(own, path, saver(), validate_access_integrity=False)
    target = ShardedTensor("w", torch.zeros(5), torch.float32, (5,), (5,), (0,), None, rank)
    return values(serialization.load({"w": target}, path))


@case
def a_part_that_no_rank_has(folder, _):
    path = folder / "part"
    own = {"w": ShardedTensor("w", torch.ones(2), torch.float32, (2,), (8,), (0,), None, dist.get_rank())}
    serialization.save(own, path, saver(), validate_access_integrity=False)
    target = ShardedTensor("w", torch.zeros(2), torch.float32, (2,), (8,), (0,), None, dist.get_rank())
    return values(serialization.load({"w": target}, path, validate_access_integrity=False))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    shared = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    own_group = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    serialization.save({**state(9.0), "step": 9}, folder / "saved", saver())
    for name, function in CASES.items():
        dist.barrier()
        try:
            found = function(folder, own_group)
        except CheckpointError as error:
            found = f"{type(error).__name__}: {error}"
        print(json.dumps([name, found]), flush=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
