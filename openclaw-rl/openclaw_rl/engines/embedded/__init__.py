"""The embedded engine: torch behind the engine dialect, in its own process, on a CPU or one GPU.

The event loop speaks HTTP (`server`, `wire`) and hands jobs to one model thread (`scheduler`). That thread batches them
over a `runner`: `llama_runner` for the Llama family, `transformers_runner` for every other architecture.
"""
