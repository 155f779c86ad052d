"""Health, metrics and alerts."""
