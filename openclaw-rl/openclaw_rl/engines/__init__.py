"""Engines: what generates. They speak SGLang's native HTTP dialect (`dialect.py`); `http.py` is the one client."""
