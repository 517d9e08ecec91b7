"""The Hydra configuration tree of `train.py`."""
