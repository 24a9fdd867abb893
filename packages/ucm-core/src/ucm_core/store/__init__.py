"""Where bytes are: a shared-memory ring over files."""
