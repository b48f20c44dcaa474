"""The int8 forward on CPU as compiled kernels; ``fused.py`` is where it is put together."""
