"""Rollout: the way between serving and training. *paired turn → verdict → sample.*"""
