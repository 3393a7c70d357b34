"""The SSD tier: extents in preallocated files, read and written beside the computation."""
