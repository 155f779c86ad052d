"""HTTP routes of the server that are not chats: status, control, feedback, the trainer API, the page."""
