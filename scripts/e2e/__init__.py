"""End-to-end checks with the real server, engine and trainer.

scripts/e2e.sh NAME FOLDER [FLAG …]
"""
