"""Benches: figures measured side by side in one run."""
