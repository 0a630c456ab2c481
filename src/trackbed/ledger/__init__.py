"""The record of a training run: what was fed in each step, and what has happened (docs/formats/run.md)."""

from trackbed.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, {
    "trackbed.ledger.observers": "TensorBoardObserver WandbObserver",
    "trackbed.ledger.record": "RunRecord read_run",
    "trackbed.ledger.recorder": "Observer",
    "trackbed.ledger.run": "Run open_run",
})  # fmt: skip
