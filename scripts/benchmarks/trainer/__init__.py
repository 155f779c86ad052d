"""What `trainer_speed.py` measures with: shapes and batches, the plain step it compares to, the sections."""
