"""The operator's routes: what there is to see, and what there is to do."""
