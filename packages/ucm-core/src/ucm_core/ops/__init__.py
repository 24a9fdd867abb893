"""How people run it: configuration and metrics."""
