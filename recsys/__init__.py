"""Recommendation models, data, metrics and training on TorchRec's types, without Optimus."""
