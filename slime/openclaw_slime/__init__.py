"""The node's trainer, and all code that knows slime, Ray or Megatron."""
