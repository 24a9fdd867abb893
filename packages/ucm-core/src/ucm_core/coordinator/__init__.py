"""What may be reused: boundaries, hits, checkpoints, retention. Knows rows and positions, never bytes."""
