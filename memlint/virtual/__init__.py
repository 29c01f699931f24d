"""CUDA memory without CUDA. So far: the caching allocator's rules."""
