"""Health, metrics and alerts of a running server."""
