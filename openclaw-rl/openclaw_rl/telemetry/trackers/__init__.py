"""Trackers: each gets the figures of every step, from the ledger, in a thread of its own."""
