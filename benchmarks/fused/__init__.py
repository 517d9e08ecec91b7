"""The benchmark models fused by hand: the yardstick for what a rewrite should reach."""
