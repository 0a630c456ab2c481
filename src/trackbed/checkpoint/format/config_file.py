"""`metadata.json`: the formats of a checkpoint, and the sign that it is complete."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import orjson

from trackbed.checkpoint.io.file_reader import AnyFolder, maybe_read_file
from trackbed.errors import CheckpointError

CONFIG_NAME: Final = "metadata.json"


@dataclass
class CheckpointingConfig:
    """Formats of a checkpoint. Fields and defaults are Megatron Core's.

    Args:
        sharded_backend: format of tensors and objects.
        sharded_backend_version: its version.
        common_backend: format of the state that is not sharded.
        common_backend_version: its version.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1

    def encode(self) -> bytes:
        """The file `metadata.json`."""
        return orjson.dumps(asdict(self))


def maybe_load_config(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """Reads `metadata.json` of a folder; None if there is none. Unknown fields are ignored.

    Raises:
        CheckpointError: it is damaged.
    """
    return read_config(Path(checkpoint_dir)) if checkpoint_dir else None


def read_config(folder: AnyFolder) -> CheckpointingConfig | None:
    """Reads `metadata.json` of a checkpoint; None if there is none. Unknown fields are ignored.

    Raises:
        CheckpointError: it is damaged.
    """
    content = maybe_read_file(folder, CONFIG_NAME)
    if content is None:
        return None
    try:
        found = orjson.loads(content)
        known = {name: found[name] for name in CheckpointingConfig.__dataclass_fields__ if name in found}
        config = CheckpointingConfig(**known)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{CONFIG_NAME}: must have the fields of a checkpoint in JSON, but cannot be read: {error}"
        ) from error
    names = isinstance(config.sharded_backend, str) and isinstance(config.common_backend, str)
    if not names or not all(type(value) is int for value in list(asdict(config).values())[1::2]):
        raise CheckpointError(
            f"{CONFIG_NAME}: formats must be names, and versions whole numbers, but are {str(asdict(config))[:200]}"
        )
    return config
