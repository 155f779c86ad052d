"""The proxy: an OpenAI-compatible API over an engine that speaks ids. Text is derived from ids and never feeds the
trainer.
"""
