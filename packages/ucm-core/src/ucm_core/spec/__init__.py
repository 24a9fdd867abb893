"""What the model is: spec tables, identities, keys, units and layouts. Imports nothing above it."""
