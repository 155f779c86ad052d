"""OpenClaw-RL: asynchronous online RL for personal agents.

The tree reads as one sentence, and a turn walks it once:
*proxy → sessions → ledger → judge → method → ledger → trainer → publisher → engine.*

Importing this package imports neither torch nor transformers.
"""

__version__ = "0.1.0"
