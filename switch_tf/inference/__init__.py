"""A trained model at work: compiled programs, and texts in and out."""
