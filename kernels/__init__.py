"""Hand-written kernels, one folder an op. Imports nothing from `optimus`."""
