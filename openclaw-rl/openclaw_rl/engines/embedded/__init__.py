"""The embedded engine: torch + transformers behind the engine dialect, in its own process, on a CPU or one GPU."""
