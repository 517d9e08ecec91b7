"""Recommendation models, data, metrics and training on TorchRec's types, without Optimus."""

import logging


def _tells_something(record: logging.LogRecord) -> bool:
    """Not so fbgemm's warning, once for each of its libraries, that its table of PyTorch's versions
    lacks its own: the lock files pair the two, and a wrong pair cannot be imported at all."""
    return "_fbgemm_torch_compat_table has no entry for" not in str(record.msg)


# Before anything here imports fbgemm, whose messages go to the root logger.
logging.getLogger().addFilter(_tells_something)
