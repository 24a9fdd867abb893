"""What runs inside an engine's environment."""
