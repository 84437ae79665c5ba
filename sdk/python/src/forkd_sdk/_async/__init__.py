"""The asynchronous client. `_sync` is generated from this package by `tools/generate_sync.py`."""
