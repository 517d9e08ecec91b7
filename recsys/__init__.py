"""Recommendation models, data, metrics and training, on TorchRec's types. Knows nothing of Optimus."""
