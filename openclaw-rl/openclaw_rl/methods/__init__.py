"""Methods: how a judged turn becomes a sample, credit per token, and a loss. Found by entry point, never a second
server.
"""
