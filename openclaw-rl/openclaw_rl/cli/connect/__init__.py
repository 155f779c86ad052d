"""`openclaw-rl connect`: point a chat client at the running server, check the connection, undo it."""
