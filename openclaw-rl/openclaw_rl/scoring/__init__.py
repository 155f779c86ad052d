"""Judging and scoring: turns with a next state become samples."""
