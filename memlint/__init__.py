"""memlint finds the code that makes PyTorch training run out of memory."""

__version__ = "0.1.0"
