"""`python -m openclaw_rl` is `openclaw-rl`."""

from openclaw_rl.cli.main import main

main()
