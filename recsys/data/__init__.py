"""Data modules and the batch and schema they share."""

from recsys.data.batch import Batch, fixed_hot_kjt, jagged_kjt
from recsys.data.schema import Schema, SparseFeature

__all__ = ["Batch", "Schema", "SparseFeature", "fixed_hot_kjt", "jagged_kjt"]
