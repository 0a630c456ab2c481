"""Checks of inputs before any work, and of the counts before anything is published."""

import logging
from collections.abc import Sequence
from pathlib import Path

from trackbed.errors import ArgumentError, PlanError
from trackbed.files.stores import is_address
from trackbed.plural import number_of
from trackbed.preprocess.config import PreprocessConfig
from trackbed.preprocess.inputs import InputFile, InputFormat
from trackbed.preprocess.report import Report
from trackbed.preprocess.splitter import SentenceSplitter

logger = logging.getLogger(__name__)


def check_inputs(config: PreprocessConfig, files: Sequence[InputFile], splitter: SentenceSplitter | None) -> None:
    """Checks that inputs and options fit together."""
    if config.images is not None:
        _check_images(config, files, splitter)
    if len(config.json_keys) > 1:
        for file in files:
            if file.format is InputFormat.PLAIN_TEXT:
                raise ArgumentError(
                    f"{file.name}: a plain text has one text, json_keys asks for {len(config.json_keys)}"
                )


def make_output_folder(output: str) -> None:
    """Makes the folder of the output if it is missing; does nothing for an address."""
    if is_address(output):
        return
    folder = Path(output).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"{folder}: the folder of the output must exist or be one that can be made, found: {error.strerror}"
        ) from error


def _check_images(config: PreprocessConfig, files: Sequence[InputFile], splitter: SentenceSplitter | None) -> None:
    if splitter is not None:
        raise ArgumentError(f"{config.output}: texts with images must be whole, found a splitter of sentences")
    for file in files:
        if file.format is not InputFormat.JSON_LINES:
            raise ArgumentError(
                f"{file.name}: records with images must be JSON lines, found a {file.format.value} file"
            )
    if not config.append_eod:
        logger.warning("%s: without --append-eod, --pad-length has no effect: texts keep their length", config.output)


def check_outputs(config: PreprocessConfig, report: Report) -> None:
    """Refuses pairs without documents, as they would replace existing pairs by empty ones."""
    for output in report.outputs:
        if output.documents == output.empty and not config.allow_empty:
            what = "document with text" if output.empty else "document"
            bad = f", {report.bad:,} of them bad, the first one {report.first_bad[0]}" if report.bad else ""
            raise PlanError(
                f"{output.prefix}: a pair must have at least one {what}, found none in "
                f"{number_of(report.records, 'record')} of {number_of(report.files, 'file')}{bad}; "
                "--allow-empty writes it anyway"
            )
