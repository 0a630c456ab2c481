"""Three gloo processes save or load, and one or all of them fail: `fault_ranks.py CASES FOLDER PLACE`.

CASES is JSON: a list of dictionaries with the fields of `Case`. PLACE is FOLDER, or an address for checkpoints. Writes
a line of JSON for each case to standard output, with its number and what came of it. Ranks are forked from this
process, which has imported everything, so a case takes little more than its timeout; some cases run at once. What looks
at an object store is forked, too, as the client of the store does not work in a process whose parent has used it.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trackbed.checkpoint import ShardedObject, ShardedTensor, load, open_checkpoint, save
from trackbed.checkpoint.background.slab import Slab
from trackbed.checkpoint.damage import find_damage
from trackbed.checkpoint.dcp import StorageWriter
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.checkpoint.leftovers import find_leftovers
from trackbed.checkpoint.plan import exchange
from trackbed.checkpoint.stored_save import StoredSave
from trackbed.checkpointer import Checkpointer
from trackbed.errors import CheckpointError
from trackbed.files.stores import is_address, list_objects, parse_address, put_bytes

SIZE = 3
AT_ONCE = 4
save_module, load_module, snapshot_module, begin_module, local_module, targets_module = (
    import_module(f"trackbed.checkpoint.{name}")
    for name in ("save", "load", "background.snapshot", "begin_save", "local_save", "io.targets")
)
folders_module = import_module("trackbed.checkpointer.folders")
PHASES = {
    "save": {
        "describe": (save_module, "describe_state"),
        "tabulate": (save_module, "tabulate"),
        "validate": (save_module, "require_valid"),
        "plan": (save_module, "assign_balanced"),
        "write": (targets_module.FileTarget, "write"),
        "write items": (targets_module, "write_items"),
        "collect": (save_module, "collect"),
        "partial folder": (begin_module, "make_partial_folder"),
        "descriptions": (save_module, "descriptions"),
        "commit": (local_module, "commit_checkpoint"),
    },
    "checkpointer": {
        "describe": (save_module, "describe_state"),
        "validate": (save_module, "require_valid"),
        "plan": (save_module, "assign_balanced"),
        "copy": (Slab, "copies_of"),
        "write": (targets_module.FileTarget, "write"),
        "write items": (targets_module, "write_items"),
        "collect": (snapshot_module, "collect_in"),
        "partial folder": (begin_module, "make_partial_folder"),
        "descriptions": (snapshot_module, "descriptions"),
        "commit": (folders_module, "commit_checkpoint"),
    },
    "load": {
        "describe": (load_module, "describe_request"),
        "open": (load_module, "open_for_all"),
        "check": (load_module, "require_loadable"),
        "read": (BoxReader, "read_box"),
        "read an object": (BoxReader, "read_object"),
        "plan": (exchange, "assign_least_loaded"),
        "exchange": (exchange, "_all_to_all"),
    },
}
AT_ADDRESSES = {
    "write": (targets_module.ObjectsTarget, "write"),
    "write items": (targets_module, "write_objects"),
    "partial folder": (begin_module, "begin_stored_save"),
    "commit": (StoredSave, "commit"),
}
"""Phases that are others where a checkpoint is saved to an address."""
ONLY_RANK_0 = ("partial folder", "descriptions", "commit")


@dataclass(frozen=True)
class Case:
    """What happens."""

    action: str
    """save, load, checkpointer for a save in the background, or "dcp save" for torch's function with our storage."""
    mode: str
    """raise, kill or stop; for `killed at` kill."""
    who: int
    """Rank; -1 for all, which are killed together."""
    phase: str = ""
    """Phase in which it happens; empty for a moment."""
    seconds: float = 0.0
    """Moment after the beginning."""
    target: str = "checkpoint"
    """absent, empty, checkpoint or others."""
    timeout: float = 5.0
    """Timeout of the process group in seconds."""
    num_elements: int = 3000
    claims_gpu: bool = False
    """True for ranks that say that they have a GPU, whose collectives may end late."""


def state_of(rank, value, num_elements):
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", torch.full((num_elements, 4), value), (0, rank, SIZE)),
        "copies": ShardedTensor.from_rank_offsets("copies", torch.full((num_elements,), value), replica_id=rank),
        "object": ShardedObject("object", {"value": value}, (SIZE,), (rank,)),
        "step": value,
    }


def divided_state(rank, value, num_elements):
    """Of one tensor each rank has a part; the other one is plain."""
    mesh = init_device_mesh("cpu", (SIZE,))
    rows = DTensor.from_local(torch.full((num_elements, 4), value), mesh, [Shard(0)], run_check=False)
    return {"rows": rows, "copies": torch.full((num_elements,), value), "step": value}


def whole_state(num_elements):
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", torch.zeros(SIZE * num_elements, 4)),
        "copies": ShardedTensor.from_rank_offsets("copies", torch.zeros(num_elements)),
        **{str(rank): ShardedObject("object", None, (SIZE,), (rank,)) for rank in range(SIZE)},
    }


def value_of(path, num_elements):
    """The one number of a checkpoint, None for a folder that is none; a text if it is not whole."""
    problems = list(find_damage(path))
    state = whole_state(num_elements)
    try:
        opened = open_checkpoint(path)
        if not opened.object_keys or "step" in opened.object_keys:  # of torch's function
            state = {key: value for key, value in state.items() if not key.isdigit()}
        found = load(state, path)
    except (CheckpointError, FileNotFoundError) as error:
        if not problems:
            return f"verify finds nothing, but: {error}"
        # Among files of others the new ones are moved one by one, and the one that makes them a checkpoint comes last.
        is_none = "must be a distributed checkpoint" in str(error) or str(error).startswith("metadata.json: must be in")
        return None if is_none else f"damaged: {error}"
    numbers = {float(value) for key in ("rows", "copies") for value in found[key].unique()}
    numbers |= {found[str(rank)]["value"] for rank in range(SIZE) if str(rank) in state} | {found["step"]}
    if problems or len(numbers) != 1:
        return f"a mixture of {numbers}, {problems}"
    return numbers.pop()


def place_of(folder):
    """Folder or address of the checkpoints of a case."""
    return f"{sys.argv[3]}/{folder.name}"


def path_of(case, folder):
    return f"{place_of(folder)}/{'step-0000001' if case.action == 'checkpointer' else 'checkpoint'}"


def store_of(rank, folder):
    """The store that rank 0 hosts. The system chooses its port, as a free one may be taken before it is used."""
    path = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, SIZE, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(path)
        return store
    while not path.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), SIZE, is_master=False)


def rank_of(case, rank, folder):
    """One rank. Returns what it found."""
    options = {"store": store_of(rank, folder), "rank": rank, "world_size": SIZE}
    dist.init_process_group("gloo", timeout=timedelta(seconds=case.timeout), **options)
    if case.claims_gpu:
        torch.cuda.is_available = lambda: True
    path = path_of(case, folder)
    flat = {"exchange": "flat"} if case.action == "load" else {}
    # Connections exist afterwards. The structure is another, so that the plan is not used again.
    save(state_of(rank, 5.0, 7), folder / "first")
    load(state_of(rank, 0.0, 7), folder / "first", exchange="flat")
    checkpointer = Checkpointer(place_of(folder)) if case.action == "checkpointer" else None

    def save_value(value):
        if checkpointer is None:
            save(state_of(rank, value, case.num_elements), path)
            return
        state = state_of(rank, value, case.num_elements)
        checkpointer.save(1, state)
        for key in ("rows", "copies"):
            state[key].data.fill_(-1.0)
        checkpointer.wait()

    def happen():
        (folder / "happened").write_text(str(time.time()))
        if case.mode == "raise":
            raise ValueError("it broke")
        os.kill(os.getpid(), signal.SIGKILL if case.mode == "kill" else signal.SIGSTOP)

    if case.phase and rank == case.who:
        phases = PHASES[case.action] | (AT_ADDRESSES if is_address(path) and case.action != "load" else {})
        owner, name = phases[case.phase]
        function = getattr(owner, name)
        armed = [True]

        def inject(*arguments, **options):
            if armed.pop() if armed else False:
                happen()
            return function(*arguments, **options)

        setattr(owner, name, inject)
    (folder / f"ready{rank}").touch()
    found = {"raised": None}
    try:
        if case.action in ("save", "checkpointer"):
            save_value(2.0)
        elif case.action == "dcp save":
            dcp.save(divided_state(rank, 2.0, case.num_elements), storage_writer=StorageWriter(path))
        else:
            load(state_of(rank, 0.0, case.num_elements), path, **flat)
    except (CheckpointError, RuntimeError) as error:  # torch's functions, over gloo
        if case.action != "dcp save" and not isinstance(error, CheckpointError):
            raise
        found = {"raised": str(error), "at": time.time()}
    if case.mode == "raise":
        save_value(3.0)
        loaded = load(state_of(rank, 0.0, case.num_elements), path, **flat)
        found["next"] = float(loaded["rows"].max())
    return found


def forked(work, output):
    """Runs a function in a new process, which writes its result, or what it raised, to a file. Returns its number."""
    process = os.fork()
    if process:
        return process
    try:
        result = work()
    except BaseException as error:
        result = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
    # Renamed once whole, as this process may be killed while it writes.
    new = output.with_name(f"{output.name}.new")
    new.write_text(json.dumps(result))
    new.rename(output)
    os._exit(0)


def asked(work, folder):
    """Runs a function in a process of its own, and returns its result."""
    output = folder / f"asked{time.monotonic_ns()}"
    os.waitpid(forked(work, output), 0)
    found = json.loads(output.read_text())
    if isinstance(found, dict) and "failed" in found:
        raise RuntimeError(found["trace"])
    return found


def begin(case, path):
    """Puts there what a case begins with."""
    if case.target == "checkpoint" or case.action == "load":
        save(state_of_all(1.0, case.num_elements), path)
    elif is_address(path):
        if case.target == "others":
            put_bytes(parse_address(f"{path}/notes.txt"), b"mine")
    elif case.target in ("empty", "others"):
        Path(path).mkdir()
        if case.target == "others":
            (Path(path) / "notes.txt").write_text("mine")


def look(case, path):
    """Value of the checkpoint, and whether what others have put there is gone."""
    if case.target != "others":
        is_gone = False
    elif is_address(path):
        is_gone = f"{path}/notes.txt" not in dict(list_objects(parse_address(path)))
    else:
        is_gone = not (Path(path) / "notes.txt").exists()
    return {"value": value_of(path, case.num_elements), "others": is_gone}


def save_again(case, folder):
    """Value of a save that follows, and what the one that came to harm has left."""
    path = path_of(case, folder)
    save(state_of_all(4.0, case.num_elements), path)
    if is_address(path):
        left = [one.address for one in find_leftovers(place_of(folder))]
    else:
        left = sorted(file.name for file in folder.iterdir() if "partial" in file.name)
    return {"after": value_of(path, case.num_elements), "left": left}


def trial(case, folder):
    """Runs a case."""
    path = path_of(case, folder)
    asked(lambda: begin(case, path), folder)
    ranks = [forked(lambda rank=rank: rank_of(case, rank, folder), folder / f"rank{rank}.json") for rank in range(SIZE)]
    if not case.phase:
        limit = time.monotonic() + 60
        while not all((folder / f"ready{rank}").exists() for rank in range(SIZE)) and time.monotonic() < limit:
            time.sleep(0.001)
        time.sleep(case.seconds)
        for rank in range(SIZE) if case.who < 0 else [case.who]:
            os.kill(ranks[rank], signal.SIGKILL)
    deadline = time.monotonic() + 60 + case.timeout
    waited = [rank for rank in range(SIZE) if not (case.mode == "stop" and rank == case.who)]
    hung = [rank for rank in waited if not ended(ranks[rank], deadline)]
    for rank in {*hung, *range(SIZE)} - ({*waited} - {*hung}):
        os.kill(ranks[rank], signal.SIGKILL)
        os.waitpid(ranks[rank], 0)
    found = [json.loads(file.read_text()) if file.exists() else None for file in outputs_of(folder)]
    happened = folder / "happened"
    result = {
        "hung": hung,
        "ranks": found,
        "happened": float(happened.read_text()) if happened.exists() else None,
    }
    result |= asked(lambda: look(case, path), folder)
    return result | asked(lambda: save_again(case, folder), folder)


def outputs_of(folder):
    return [folder / f"rank{rank}.json" for rank in range(SIZE)]


def state_of_all(value, num_elements):
    """State that one process saves, with what three ranks have."""
    state = whole_state(num_elements)
    for key in ("rows", "copies"):
        state[key].data.fill_(value)
    for rank in range(SIZE):
        state[str(rank)].data = {"value": value}
    return {**state, "step": value}


def ended(process, deadline):
    while not os.waitpid(process, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def main():
    torch.set_num_threads(1)
    # Stores and gloo look up names of hosts, which must not take the time that is measured here.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "attempts:0"}
    cases, base = [Case(**case) for case in json.loads(sys.argv[1])], Path(sys.argv[2])
    order = list(range(len(cases)))
    random.Random(1).shuffle(order)
    running = {}
    while order or running:
        while order and len(running) < AT_ONCE:
            number = order.pop()
            folder = base / str(number)
            folder.mkdir()
            running[forked(lambda number=number, folder=folder: trial(cases[number], folder), folder / "result")] = (
                number
            )
        process, _ = os.wait()
        if process in running:
            number = running.pop(process)
            result = json.loads((base / str(number) / "result").read_text())
            print(json.dumps({"number": number, **result}), flush=True)


if __name__ == "__main__":
    main()
