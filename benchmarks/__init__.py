"""Figures side by side with a peer, as ratios in one run. `python -m benchmarks` runs them all."""
