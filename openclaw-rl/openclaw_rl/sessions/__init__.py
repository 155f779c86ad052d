"""Sessions: whose conversation a request belongs to, what kind of turn it is, and which reply it answers."""
