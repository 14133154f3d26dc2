"""Loss and task metrics on a split."""
