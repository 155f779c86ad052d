"""Checks of the server and of the node on a GPU host, and their rehearsal without a GPU."""
