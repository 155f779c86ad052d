"""The server program: one process that serves chats, judges turns, hands out batches and publishes versions."""
