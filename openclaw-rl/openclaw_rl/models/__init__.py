"""Model folders: find, convert, identify, and estimate the memory of a model."""
