"""Parts of `ledger_scale.py`: conversations, calls that fill a ledger, its copies, and the event loop's delay."""
