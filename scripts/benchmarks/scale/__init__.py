"""What `ledger_scale.py` fills a ledger with, and how it looks at it."""
