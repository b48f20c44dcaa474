"""What compiled CPU code stands on: vector primitives and the cache of machine code."""
