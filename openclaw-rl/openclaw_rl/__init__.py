"""OpenClaw-RL: asynchronous online RL for personal agents.

Nine folders are the sentence that a turn walks once:
*proxy → sessions → ledger → judge → scoring → methods → trainers → publishing → engines.*

The programs are in `server`, `cli` and `offline`; the nouns that all of them share are in the other folders and files.
`instructions/architecture.md` describes the processes and the life of a turn. Importing this package imports neither
torch nor transformers.
"""

__version__ = "0.1.0"
