"""Adapters for agent frameworks. Each module imports its framework, which is not a dependency of this package."""
