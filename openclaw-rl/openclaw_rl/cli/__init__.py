"""The command line `openclaw-rl`."""
