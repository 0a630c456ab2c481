"""Reads packed Parquet with Megatron-Bridge's own class, and packs documents with its own code.

Run by a Python that has megatron-bridge, as `python bridge_reader.py REQUEST.json`. The package's own modules that only
import others are stubbed: they import every model.
"""

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np

ROOMS = ("", ".data", ".data.packing", ".data.datasets", ".training", ".training.tokenizers", ".utils")


def stub_packages():
    places = [Path(one) for one in importlib.util.find_spec("megatron").submodule_search_locations]
    root = next(place / "bridge" for place in places if (place / "bridge").is_dir())
    for room in ROOMS:
        package = types.ModuleType(f"megatron.bridge{room}")
        package.__path__ = [str(root / room[1:].replace(".", "/"))]
        sys.modules[package.__name__] = package


class Tokenizer:
    def __init__(self, eos_id):
        self.eos_id = self.eod = eos_id


def read(request):
    """The batches of all rows of a file, one row each, without and with a constant number of borders."""
    from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset

    found = {}
    for kind, pads_borders in (("plain", False), ("padded", True)):
        dataset = GPTSFTPackedParquetDataset(
            file_path=request["path"],
            tokenizer=Tokenizer(request["eos_id"]),
            max_seq_length=request["sequence_length"],
            pad_seq_to_mult=request["multiple"],
            pad_to_max_length=True,
            pad_cu_seqlens=pads_borders,
            pack_metadata_file_path=request["metadata"],
            label_key="output",
            truncation_field="input",
            prompt_template="{input} {output}",
        )
        for number in range(len(dataset)):
            row = dataset[number]
            dataset.validate_row(number, row["input_ids"], row["loss_mask"], row["seq_boundaries"][:-1])
            batch = dataset.collate_fn([row])
            found |= {f"{kind}.{number}.{name}": one for name, one in batch.items() if hasattr(one, "numpy")}
    np.savez(request["output"], **found)


def pack(request):
    """Documents with masks, padded, packed and written by Bridge's code."""
    from megatron.bridge.data.packing.algorithms import create_hist, create_packing_strategy, fill_packing_strategy
    from megatron.bridge.data.packing.offline import _pre_pad_data_point
    from megatron.bridge.data.packing.parquet import write_packed_parquet

    length, multiple = request["sequence_length"], request["multiple"]
    data = np.array([dict(one) for one in request["documents"]])
    for one in data:
        places = -(-(len(one["input_ids"]) - 1) // multiple) * multiple
        if multiple > 1:
            _pre_pad_data_point(one, length, min(length // multiple * multiple, places) + 1, request["eos_id"])
    np.random.seed(0)  # noqa: NPY002  of Bridge's code
    by_length, histogram = create_hist(data, length)
    assignments, _ = create_packing_strategy(histogram, length, "first_fit_shuffle")
    write_packed_parquet(fill_packing_strategy(assignments, by_length, length, request["eos_id"]), request["output"])


if __name__ == "__main__":
    stub_packages()
    wanted = json.loads(Path(sys.argv[1]).read_text())
    {"read": read, "pack": pack}[wanted["what"]](wanted)
