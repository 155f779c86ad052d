"""On-policy distillation from hindsight hints: the second of the three methods."""
