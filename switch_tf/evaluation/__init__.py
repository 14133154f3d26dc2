"""Loss and task metrics of a model on a split."""
