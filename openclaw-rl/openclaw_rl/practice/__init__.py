"""Practice: while nobody chats, the policy answers corrected prompts anew and learns from the guided teacher."""
