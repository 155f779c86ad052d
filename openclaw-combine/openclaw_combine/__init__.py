"""Binary RL and on-policy distillation in one update: the third of the three methods."""
