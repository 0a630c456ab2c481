"""Process that copies an index from a store: `fetch_index.py ADDRESS FOLDER`; prints the sum of the lengths."""

import sys

from trackbed.tokens import IndexedDataset, ObjectStorageConfig

if __name__ == "__main__":
    address, folder = sys.argv[1:]
    dataset = IndexedDataset(address, mmap=False, object_storage_config=ObjectStorageConfig(folder))
    print("opened", flush=True)
    print(int(dataset.sequence_lengths.sum()), flush=True)
