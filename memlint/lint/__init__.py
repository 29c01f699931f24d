"""The linter: sources in, findings out. Nothing here imports torch."""
