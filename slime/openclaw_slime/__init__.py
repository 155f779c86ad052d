"""All that knows slime, Ray and Megatron: the trainer of the node. So far the launch plan, its layout and argv."""
