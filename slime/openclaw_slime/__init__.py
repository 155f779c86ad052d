"""All that knows slime, Ray and Megatron: the trainer of the 8-GPU node. Not built yet."""
