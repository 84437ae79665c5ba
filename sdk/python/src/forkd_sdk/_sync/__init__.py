# Generated from `_async` by tools/generate_sync.py. Do not edit.
"""The blocking client, generated from `_async` by `tools/generate_sync.py`."""
