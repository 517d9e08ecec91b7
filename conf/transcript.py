"""What a run says, in Hydra's log file of it: Lightning, Optimus and warnings go past its handlers.

On the console nothing changes.
"""

from __future__ import annotations

import logging

from optimus.logbook import SAID

_RUN = logging.getLogger("train")
_RUN.propagate = False
_RUN.addHandler(logging.NullHandler())

# Whoever writes to these has shown it already: they do not propagate to Hydra's console handler.
_APART = ("lightning.pytorch", "lightning.fabric", SAID.name, _RUN.name)


def begin() -> None:
    """From now on write all that is said to the log files that Hydra has opened, if it has."""
    files = [h for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]
    if not files:
        return
    for logger in map(logging.getLogger, _APART):
        if not logger.propagate:
            _add(logger, files)
    _take_warnings(files)


def stopped(reason: str) -> None:
    """Note in the log file alone why the run did not end as it should."""
    _RUN.error("stopped: %s", reason)


def _take_warnings(files: list[logging.FileHandler]) -> None:
    warnings = logging.getLogger("py.warnings")
    console = logging.StreamHandler()
    console.terminator = ""  # a formatted warning ends its line itself
    warnings.handlers = [console]
    warnings.propagate = False
    _add(warnings, files)
    logging.captureWarnings(True)


def _add(logger: logging.Logger, files: list[logging.FileHandler]) -> None:
    for file in files:
        logger.addHandler(file)
