"""The judge (process reward model): a verdict of +1, 0 or −1 on a turn, from its request, reply and next state."""
