"""Sessions: the conversation of a request, its kind of turn, and the reply that it answers."""
