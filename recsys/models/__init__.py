"""Recommender models, one file each, all built from a `recsys.data.schema.Schema`.

To add one: a file here with a subclass of `RecModel`, and its config.
"""
