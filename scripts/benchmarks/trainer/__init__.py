"""Parts of `trainer_speed.py`: shapes and batches, the plain step for comparison, and the sections."""
