"""Engines: the processes that generate text. They speak SGLang's native HTTP dialect; `client` is the one client."""
