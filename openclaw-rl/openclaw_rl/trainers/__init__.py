"""Trainers are clients: they lease samples, step, checkpoint and commit (`api.py`). `local.py` is the LoRA trainer."""
