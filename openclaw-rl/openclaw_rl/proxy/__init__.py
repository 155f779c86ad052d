"""The proxy: an OpenAI-compatible API over an engine that takes and returns ids.

Text is derived from ids; the trainer never reads it.
"""
