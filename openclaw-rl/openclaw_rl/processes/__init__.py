"""Child processes: how they are supervised, how they start, and how each gives its memory back."""
